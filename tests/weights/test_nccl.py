"""The nccl transport and vLLM's receiving engine on the CPU: gloo has NCCL's part, threads that of CUDA's streams.

NCCL itself is in tests/gpu/.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from cpu_transports import TIMEOUT_S, patch_nccl
from programs import wait_until

from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.transport import ParameterSpec

# more than the buffers of a socket, so that a sender waits for who does not receive
CHUNK_BYTES = 1 << 24
SIZES = (3 << 22, 1 << 22, 1 << 22, 5, 1 << 23, 7, 1)
SPECS = [ParameterSpec(f"p{i}", torch.bfloat16, (size,)) for i, size in enumerate(SIZES)]


def parameters(value):
    return [(spec.name, torch.full(spec.shape, float(value + i))) for i, spec in enumerate(SPECS)]


@pytest.fixture(autouse=True)
def on_gloo(monkeypatch):
    from vllm.distributed.weight_transfer import packed_tensor

    patch_nccl(monkeypatch, CHUNK_BYTES)
    packed_tensor._get_streams.cache_clear()
    yield
    packed_tensor._get_streams.cache_clear()


@contextmanager
def transport(ranks_per_worker=1):
    """A transport that leaves no thread behind."""
    made = NcclTransport(SPECS, torch.device("cpu"), ranks_per_worker, TIMEOUT_S)
    yield made
    made.close()
    for thread in threading.enumerate():
        if thread.name.startswith("send-to-worker"):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


class Engine:
    """A rank of vLLM's own end, with a model that keeps what it is given; it may pause after a chunk."""

    def __init__(self, info, rank=0):
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.weights, self.goes_on, self.is_killed = {}, threading.Event(), False
        self.goes_on.set()
        parallel = SimpleNamespace(data_parallel_index=0, world_size=2, rank=rank)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        model = SimpleNamespace(load_weights=self.load)
        self._end = NCCLWeightTransferEngine(None, config, torch.device("cpu"), model)
        self._end.init_transfer_engine(self._end.parse_init_info(info))

    def load(self, named):
        if not self.goes_on.wait(TIMEOUT_S) or self.is_killed:
            self.leave()
            raise InterruptedError("killed")
        self.weights |= {name: tensor.clone() for name, tensor in named}

    def leave(self):
        self._end.shutdown()

    def update(self, messages):
        for message in messages:
            self._end.update_weights(message)

    def holds(self, value):
        expected = ((name, tensor.bfloat16()) for name, tensor in parameters(value))
        return len(self.weights) == len(SPECS) and all(
            self.weights[name].equal(tensor) for name, tensor in expected
        )


def receive(transport, worker, engine, staged):
    """What controller and worker do between Receiving and WeightsLoaded."""
    transport.acquire(staged)
    transport.send(worker, staged)
    engine.update(staged.messages)
    transport.release(staged)


def test_every_rank_of_an_engine_gets_each_version():
    with transport(ranks_per_worker=2) as sent, ThreadPoolExecutor(2) as threads:
        info = sent.init_info(0)
        engines = list(threads.map(lambda rank: Engine(info, rank), range(2)))
        for version in range(2):
            staged = sent.stage(version, parameters(version))
            sent.send(0, staged)
            list(threads.map(Engine.update, engines, [staged.messages] * 2))
            assert all(engine.holds(version) for engine in engines)
        sent.check()


def test_a_worker_that_hangs_and_is_killed_while_it_receives_does_not_hold_up_the_other():
    """The buffer is written again when both are done with it. The worker joins a new group when it starts again."""
    with transport() as sent:
        hanging, other = (Engine(sent.init_info(worker)) for worker in (0, 1))
        staged = sent.stage(0, parameters(0))
        sent.make_readable(staged)
        hanging.goes_on.clear()
        with ThreadPoolExecutor(1) as thread:
            hung = thread.submit(receive, sent, 0, hanging, staged)
            receive(sent, 1, other, staged)
            assert other.holds(0) and not hung.done() and not hanging.weights
            assert not sent.try_reserve_buffer(), "it is being sent"
            sent.disconnect(0)
            hanging.is_killed = True
            hanging.goes_on.set()
            assert isinstance(hung.exception(), InterruptedError)
        sent.release(staged)
        again = Engine(sent.init_info(0))
        staged = sent.stage(1, parameters(1))
        for worker, engine in ((0, again), (1, other)):
            receive(sent, worker, engine, staged)
            assert engine.holds(1)
        sent.check()


def breaks(*_):
    raise OSError("no such device")


def test_an_error_of_the_link_is_the_runs_error_unless_the_worker_is_gone_soon(monkeypatch):
    monkeypatch.setattr("asyncrl.weights.nccl.DEATH_S", 1.0)
    monkeypatch.setattr("torch.cuda.Stream", breaks)
    with transport() as sent:
        start = time.monotonic()
        sent.init_info(3)

        def error():
            try:
                sent.check()
            except RuntimeError as error:
                return str(error)

        assert wait_until(error) == "joining rollout worker 3's NCCL group failed: no such device"
        assert time.monotonic() - start > 1.0, "the death of a worker can be known later"
        sent.disconnect(3)
        sent.check()
