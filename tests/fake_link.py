"""The two ends of a weight-transfer group on the CPU: a link for the trainer, an engine as vLLM's behaves on its side.

They meet as vLLM's do, at the port that init_info names, with ranks that count from its rank_offset; the bytes go
through a socket instead of NCCL. The engine's end imports no torch, so that a worker starts at once.
"""

import contextlib
import math
import time
from multiprocessing.connection import Client, Connection

import numpy as np

TIMEOUT_S = 20.0
POLL_S = 0.005
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class SocketLink:
    """Rank 0 of a group."""

    def __init__(self, listening, num_ranks: int, device, timeout_s: float):
        """Wait for all others: longer than the transport does, but not for ever."""
        self._aborted, self._others = False, {}
        with listening:
            listening.settimeout(timeout_s + 0.5)
            while len(self._others) < num_ranks - 1:
                other = Connection(listening.accept()[0].detach())
                self._others[other.recv()] = other
        assert sorted(self._others) == list(range(1, num_ranks))

    def send(self, chunks):
        """As NCCL does, wait for the others without end, or until the group is given up."""
        payload = b"".join(chunk.numpy().tobytes() for chunk in chunks)
        for other in self._others.values():
            other.send(payload)
        for other in self._others.values():
            while not self._acknowledged(other):
                if self._aborted:
                    raise RuntimeError("the group was given up")

    def _acknowledged(self, other):
        # a dead peer does not end a transfer of NCCL's
        with contextlib.suppress(EOFError, OSError):
            return other.poll(POLL_S) and other.recv() == "received"
        time.sleep(POLL_S)
        return False

    def abort(self):
        self._aborted = True


class FakeEngine:
    """One rank of an engine: init, then start, update, finish, in this order, as vLLM's engines insist."""

    def __init__(self, rank: int = 0):
        self.rank = rank
        self.weights: dict[str, bytes] = {}
        self._active = False

    def init_weight_transfer_engine(self, init_info: dict):
        assert init_info["packed"] and init_info["packed_buffer_size_bytes"] > 0
        rank = self.rank + init_info["rank_offset"]
        assert 0 < rank < init_info["world_size"]
        self._trainer = connected(init_info["master_address"], init_info["master_port"])
        self._trainer.send(rank)

    def start_weight_update(self):
        assert not self._active
        self._active = True

    def update_weights(self, update_info: dict):
        assert self._active and self._trainer.poll(TIMEOUT_S)
        payload = self._trainer.recv()
        self._trainer.send("received")
        described = zip(
            *(update_info[name] for name in ("names", "dtype_names", "shapes")), strict=True
        )
        for name, dtype_name, shape in described:
            num_bytes = ITEM_BYTES[dtype_name] * math.prod(shape)
            self.weights[name], payload = payload[:num_bytes], payload[num_bytes:]
            assert len(self.weights[name]) == num_bytes
        assert not payload

    def finish_weight_update(self):
        assert self._active
        self._active = False

    def update(self, messages: list[dict]):
        """All phases of one update."""
        self.start_weight_update()
        for message in messages:
            self.update_weights(message)
        self.finish_weight_update()

    def floats(self, name: str) -> np.ndarray:
        """A float32 parameter, flat."""
        return np.frombuffer(self.weights[name], np.float32)


def connected(address: str, port: int):
    """Connect when somebody listens; vLLM's processes come in any order, too."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return Client((address, port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
