"""What measures this code on a GPU: `python scripts/bench/gpu.py --help`."""
