"""What travels between learners and the controller, and how."""
