"""A job whose trainer stages wrong weights: in versions 2 to 4 one norm arrives as zeros."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_async  # noqa: I001  the path comes first
from corruptions import not_sent
from asyncrl.weights.shm import ShmTransport

stage_truly = ShmTransport.stage


def stage(transport, version, parameters):
    """Stage weights as ShmTransport does, or wrong ones."""
    if 2 <= version <= 4:
        parameters = not_sent(list(parameters), "model.layers.0.input_layernorm.weight")
    return stage_truly(transport, version, parameters)


if __name__ == "__main__":
    ShmTransport.stage = stage
    train_async.main()
