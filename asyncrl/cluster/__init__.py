"""Processes, GPUs and nodes of a run. Runs everywhere."""
