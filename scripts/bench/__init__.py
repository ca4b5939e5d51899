"""What measures this code. Each bench is a command of its own: `python scripts/bench/rollout.py --help`."""

import sys
from pathlib import Path

# Python looks into the folder of a script first, where rollout.py would hide the rollout worker's.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).parent]
