"""Weights to rollout workers on other GPUs, by NCCL, in the chunks that vLLM's own weight-transfer engine receives.

Rank 0 of the trainer first gathers into a staging buffer with all other ranks. Sending between two gathers deadlocks:
other ranks wait for a worker, and the worker can wait for them. A thread then sends while the trainer continues. It
starts when the worker is ready. So its kernels wait on the GPU for the next chunk only, and for no sampling.

There is one NCCL group per worker: rank 0 of the trainer, and the ranks of that worker's engine. So each worker loads
at its own time. If a worker dies, hangs or starts again, other workers are not affected. Each group has its own stream,
unlike vLLM's sending end. The staged memory itself is sent, without another copy.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Iterable

import torch

from asyncrl.weights.packed import CHUNK_BYTES, Packed
from asyncrl.weights.transport import BufferedTransport, ParameterSpec, Staged, Weights, layout

ADDRESS = "127.0.0.1"
ABORT_S = 6.0
"""Seconds; longer than vLLM's limit for the abort of a communicator."""
DEATH_S = 5.0
"""Time until a worker's death becomes known. If a worker is killed while its group is made, NCCL fails earlier."""
NUM_CHUNK_BUFFERS = 1
"""Chunks that an engine receives at a time. With two, one stream could overwrite a chunk that the other
still reads, for a layer that is not whole. The gain of a second one was not measured on a GPU."""


def import_communicator() -> None:
    """Import vLLM's communicator."""
    # It reads the number of compile threads. vLLM's import then sets it to one.
    import torch._inductor.config  # noqa: F401

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm.distributed.device_communicators.pynccl  # noqa: F401


class _Link:
    """A thread as rank 0 of an NCCL group: it joins, then sends. The other ranks are the engine of one worker.

    Sending has no limit of time. A worker ends itself after --timeout-s in a transfer, and its death destroys the link.
    """

    def __init__(self, worker: int, num_ranks: int, device: torch.device, timeout_s: float):
        """Listen at a port, and begin to meet the other ranks there.

        `timeout_s` limits that. A worker that joins late ends by its own limit, --timeout-s, so this one is longer.
        """
        self._worker = worker
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._communicator = None
        self._error: Exception | None = None
        self._failed_at = 0.0
        self._is_destroyed = False
        self._action = f"joining rollout worker {worker}'s NCCL group"
        listening = socket.create_server((ADDRESS, 0))
        self.port = listening.getsockname()[1]
        # a daemon, because a thread that waits for a dead worker in NCCL must not keep the process alive
        threading.Thread(
            target=self._run,
            args=(listening, num_ranks, device, int(timeout_s)),
            name=f"send-to-worker-{worker}",
            daemon=True,
        ).start()

    def _run(self, *meeting) -> None:
        try:
            stream = self._join(*meeting)
            self._action = f"sending weights to rollout worker {self._worker} by NCCL"
            while not self._is_destroyed:
                chunks = self._jobs.get()
                if chunks is None:
                    return
                for chunk in chunks:
                    self._communicator.broadcast(chunk, src=0, stream=stream)
                stream.synchronize()
        except Exception as error:  # of torch or vLLM; `check` raises it in the main thread
            self._failed_at = time.monotonic()
            self._error = error

    def _join(
        self, listening: socket.socket, num_ranks: int, device: torch.device, timeout_s: int
    ) -> torch.cuda.Stream:
        """Make the communicator, and return its stream. Raises RuntimeError if NCCL's library is missing."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        torch.cuda.set_device(device)  # of this thread
        stream = torch.cuda.Stream(device)
        meet = {"store_timeout": timeout_s, "listen_socket": listening}
        group = StatelessProcessGroup.create(ADDRESS, self.port, 0, num_ranks, **meet)
        # on the default stream the trainer's kernels would wait for the group's first kernel
        with torch.cuda.stream(stream):
            self._communicator = PyNcclCommunicator(group, device=device)
        if self._communicator.disabled:
            raise RuntimeError("vLLM finds no NCCL library; use --weight-sync shm")
        return stream

    def send(self, chunks: Iterable[torch.Tensor]) -> None:
        """Begin to send [bytes] uint8 tensors, the chunks of Packed, after the chunks of earlier calls."""
        self._jobs.put(chunks)

    def check(self) -> None:
        """Raise the thread's error, unless the worker may have died: its death then destroys the link."""
        if self._error is not None and time.monotonic() > self._failed_at + DEATH_S:
            raise RuntimeError(f"{self._action} failed: {self._error}") from self._error

    def destroy(self) -> None:
        """Begin to destroy the group. A broadcast that waits for a dead worker ends."""
        self._is_destroyed = True
        self._jobs.put(None)
        # in a thread, because it takes seconds and the controller's lock is held
        self._aborting = threading.Thread(target=self._abort, daemon=True)
        self._aborting.start()

    def _abort(self) -> None:
        if self._communicator is not None:
            self._communicator.destroy()

    def wait(self) -> None:
        """Wait until the destroyed link has ended, for at most ABORT_S."""
        self._aborting.join(ABORT_S)


class NcclTransport(BufferedTransport):
    """Weights from rank 0's GPU to the GPUs of the workers: a staging buffer, and a link to each worker."""

    def __init__(
        self,
        specs: list[ParameterSpec],
        device: torch.device,
        ranks_per_worker: int,
        timeout_s: float,
    ):
        """`ranks_per_worker`: GPUs of one worker's engine. `timeout_s` is the limit of each action of a worker."""
        super().__init__(specs, num_buffers=1)
        # now, because it takes seconds, and a thread would import it during a step
        import_communicator()
        self.device, self.ranks_per_worker = device, ranks_per_worker
        self._timeout_s = timeout_s
        self._packed = Packed(specs, device)
        self._links: dict[int, _Link] = {}

    def init_info(self, worker: int = 0) -> dict:
        """Begin a group with a worker that has just started. Return vLLM's init info for joining it."""
        self.disconnect(worker)
        num_ranks = 1 + self.ranks_per_worker
        link = _Link(worker, num_ranks, self.device, 2 * self._timeout_s)
        self._links[worker] = link
        return {
            "master_address": ADDRESS,
            "master_port": link.port,
            "rank_offset": 1,
            "world_size": num_ranks,
            "packed": True,
            "packed_buffer_size_bytes": CHUNK_BYTES,
            "packed_num_buffers": NUM_CHUNK_BUFFERS,
        }

    def write(self, buffer: int, version: int, parameters: Weights) -> list[dict]:
        """Copy weights into the staging buffer. The trainer need not wait longer."""
        self._packed.fill(parameters)
        return [layout(self.specs)]

    def send(self, worker: int, staged: Staged) -> None:
        """Send to a worker that waits for the weights. Return at once."""
        self._links[worker].send(self._packed.chunk_payloads)

    def disconnect(self, worker: int) -> None:
        """Destroy the group of a worker that has died."""
        link = self._links.pop(worker, None)
        if link is not None:
            link.destroy()

    def check(self) -> None:
        """Raise RuntimeError if a group or a transfer failed longer than DEATH_S ago."""
        for link in list(self._links.values()):
            link.check()

    def close(self) -> None:
        """Destroy all groups. A broadcast that still waits would keep the process from its end."""
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.destroy()
        for link in links:
            link.wait()
