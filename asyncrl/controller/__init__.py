"""Groups, tickets, batches and workers of a node. Runs in the leader, local rank 0."""
