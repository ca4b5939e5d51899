"""Tasks, environments and datasets, one file per idea, and the weights of the tiny models. Imports nothing of ours."""
