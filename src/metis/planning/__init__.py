"""What a policy will cost before anything is trained, and what another would have cost."""
