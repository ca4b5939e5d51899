"""A trainer's end of weights that are pulled: it stages versions of which each changes a share of the values."""

import torch
from hosts import wait_until

from asyncrl.weights.transport import ParameterSpec
from extras.swarm.pull import PullTransport
from extras.swarm.snapshots import SnapshotWriter
from extras.swarm.wire import Piece

SPECS = [ParameterSpec("a", torch.bfloat16, (301, 7)), ParameterSpec("b", torch.float32, (5,))]


class Trainer:
    """Has a transport, and, if there is a URL, files."""

    def __init__(self, url=None, specs=SPECS, seed=0):
        self.url, self.specs, self.version = url, specs, -1
        self.generator = torch.Generator().manual_seed(seed)
        self.values = [(spec.name, self.random(spec.shape)) for spec in specs]
        self.begin()

    def begin(self):
        self.writer = None if self.url is None else SnapshotWriter(str(self.url))
        self.transport = PullTransport(self.specs, self.writer)

    def random(self, shape):
        return torch.rand(shape, generator=self.generator)

    def stage(self, share=0.01):
        """Stage the next version. Returns its update info."""
        self.version += 1
        self.values = [
            (name, torch.where(self.random(value.shape) < share, value + 0.1, value))
            for name, value in self.values
        ]
        (self.info,) = self.transport.stage(self.version, self.values).messages
        return self.info

    def write(self, share=0.01):
        """Stage a version. Returns its update info when its file is there, or has failed."""
        info = self.stage(share)
        wait_until(lambda: self.is_written or self.writer.is_failing)
        return info

    @property
    def is_written(self):
        return self.writer._written is not None and self.writer._written.version == self.version

    def answer(self, pull, num_bytes):
        """The piece that a host asks for, of at most so many bytes."""
        is_delta, stream = self.transport.open(pull.version, pull.base)
        data = bytes(memoryview(stream)[pull.offset : pull.offset + num_bytes])
        return Piece(pull.version, is_delta, len(stream), pull.offset, data)
