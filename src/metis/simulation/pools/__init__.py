"""Where simulated learners train."""
