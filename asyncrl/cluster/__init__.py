"""Processes, GPUs, memory and the nodes of a run: what runs where. Runs everywhere."""
