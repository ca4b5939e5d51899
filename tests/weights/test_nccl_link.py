"""NcclLink and vLLM's own receiving engine on the CPU: gloo has NCCL's part, and threads that of CUDA's streams."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from cpu_transports import TIMEOUT_S, Communicator, patch_nccl

from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.transport import ParameterSpec

# more than the buffers of a socket, so that a sender waits for who does not receive
CHUNK_BYTES = 1 << 24
SIZES = (3 << 22, 5, 1 << 22, 1, 1 << 23, 7)
SPECS = [ParameterSpec(f"p{i}", torch.bfloat16, (size,)) for i, size in enumerate(SIZES)]


def parameters(value):
    return [(spec.name, torch.full(spec.shape, float(value + i))) for i, spec in enumerate(SPECS)]


@pytest.fixture
def on_gloo(monkeypatch):
    from vllm.distributed.weight_transfer import packed_tensor

    patch_nccl(monkeypatch, CHUNK_BYTES)
    packed_tensor._get_streams.cache_clear()
    yield
    packed_tensor._get_streams.cache_clear()


class Engine:
    """vLLM's own end, with a model that keeps what it is given; it may stand still after a chunk."""

    def __init__(self, info):
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.weights, self.goes_on, self.is_killed = {}, threading.Event(), False
        self.goes_on.set()
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        self._end = NCCLWeightTransferEngine(
            None, config, torch.device("cpu"), SimpleNamespace(load_weights=self.load)
        )
        self._end.init_transfer_engine(self._end.parse_init_info(info))

    def load(self, named):
        if not self.goes_on.wait(TIMEOUT_S) or self.is_killed:
            self._end.shutdown()
            raise InterruptedError("killed")
        self.weights |= {name: tensor.clone() for name, tensor in named}

    def update(self, messages):
        for message in messages:
            self._end.update_weights(message)

    def holds(self, value):
        expected = ((name, tensor.bfloat16()) for name, tensor in parameters(value))
        return len(self.weights) == len(SPECS) and all(
            self.weights[name].equal(tensor) for name, tensor in expected
        )


@pytest.fixture
def transport(on_gloo):
    made = NcclTransport(SPECS, torch.device("cpu"), 1, TIMEOUT_S)
    yield made
    made.close()
    while senders := [
        thread for thread in threading.enumerate() if thread.name.startswith("send-to-worker")
    ]:
        senders[0].join(TIMEOUT_S)
        assert not senders[0].is_alive()


@pytest.mark.parametrize("told", ["3", pytest.param(None, marks=pytest.mark.slow)])
def test_vllms_import_takes_no_threads_from_the_trainers_compiler(told):
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"
    }
    environment |= {} if told is None else {"TORCHINDUCTOR_COMPILE_THREADS": told}
    says = (
        "import os, asyncrl.weights.nccl; asyncrl.weights.nccl.import_communicator(); import torch._inductor.config; "
        "print(os.environ.get('TORCHINDUCTOR_COMPILE_THREADS'), torch._inductor.config.compile_threads)"
    )
    run = subprocess.run(
        [sys.executable, "-c", says], env=environment, capture_output=True, text=True, check=True
    )
    threads = 3 if told else min(32, len(os.sched_getaffinity(0)))
    assert run.stdout.splitlines()[-1] == f"{told} {threads}"


def receive(transport, worker, engine, staged):
    transport.send(worker, staged)
    engine.update(staged.messages)


def test_vllms_receiving_end_gets_each_version_in_its_own_chunks_of_the_staged_memory(transport):
    engine = Engine(transport.init_info(0))
    for version in range(2):
        receive(transport, 0, engine, transport.stage(version, parameters(version)))
        assert engine.holds(version)
    transport.check()
    packed = transport._packed
    assert [list(chunk) for chunk in packed.chunks] == [[0], [1, 2, 3, 4], [5]], (
        "a chunk ends beyond CHUNK_BYTES"
    )
    offsets = [(address - packed.payload.data_ptr(), size) for address, size in Communicator.sent]
    starts = [sum(2 * size for size in SIZES[:i]) for i in (0, 1, 5)]
    assert (
        offsets
        == [
            (start, 2 * sum(SIZES[i] for i in chunk))
            for start, chunk in zip(starts, packed.chunks, strict=True)
        ]
        * 2
    )


def test_a_worker_that_hangs_and_is_killed_while_it_receives_does_not_hold_up_the_other(transport):
    hanging, other = (Engine(transport.init_info(worker)) for worker in (0, 1))
    staged = transport.stage(0, parameters(0))
    hanging.goes_on.clear()
    with ThreadPoolExecutor(1) as thread:
        hung = thread.submit(receive, transport, 0, hanging, staged)
        receive(transport, 1, other, staged)
        assert other.holds(0) and not hung.done() and not hanging.weights
        transport.drop(0)
        hanging.is_killed = True
        hanging.goes_on.set()
        assert isinstance(hung.exception(), InterruptedError)
    again = Engine(transport.init_info(0))
    staged = transport.stage(1, parameters(1))
    for worker, engine in ((0, again), (1, other)):
        receive(transport, worker, engine, staged)
        assert engine.holds(1)
    transport.check()
