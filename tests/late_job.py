"""A whole job whose transport brings each version late: `late_job.py FIRST [options of train_async.py]`.

From version FIRST on, engines get the weights of the version before, under the name of the version that is due.
"""

import sys

from asyncrl.job import node
from asyncrl.job.command_line import parse_config
from asyncrl.weights.shm import ShmTransport
from train_async import run_job, train


class LateTransport(ShmTransport):
    """Stages weights as they were at the last call."""

    first: int
    kept = ()

    def stage(self, version, parameters):
        copies = [(name, tensor.clone()) for name, tensor in parameters]
        late, self.kept = self.kept, copies
        return super().stage(version, copies if version < self.first else late)


if __name__ == "__main__":
    LateTransport.first = int(sys.argv[1])
    node.ShmTransport = LateTransport
    config = parse_config(sys.argv[2:])
    run_job(lambda: train(config))
