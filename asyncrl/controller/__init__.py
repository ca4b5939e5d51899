"""Which group starts where, which may be trained on, and what every worker does. Runs in the leader, local rank 0 of a
node."""
