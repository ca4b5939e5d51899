"""Trees: what several sequences of an update begin with is read once."""
