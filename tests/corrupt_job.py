"""A job whose trainer stages wrong weights: `torchrun tests/corrupt_job.py FIRST LAST [options of train_async.py]`.

From version FIRST to version LAST one norm arrives as zeros.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_async  # noqa: I001  the path comes first
from corruptions import not_sent
from asyncrl.weights.shm import ShmTransport

stage_truly = ShmTransport.stage
NORM = "model.layers.0.input_layernorm.weight"

if __name__ == "__main__":
    first, last = int(sys.argv.pop(1)), int(sys.argv.pop(1))

    def stage(transport, version, parameters):
        if first <= version <= last:
            parameters = not_sent(list(parameters), NORM)
        return stage_truly(transport, version, parameters)

    ShmTransport.stage = stage
    train_async.main()
