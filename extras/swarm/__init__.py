"""Echo: hosts that join a run and sample for it."""
