"""The pure core: a state machine (event, now) -> actions; no clock, thread, socket, file or randomness."""
