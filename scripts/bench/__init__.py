"""Measurements of this code on a GPU: `python scripts/bench/gpu.py --help`."""
