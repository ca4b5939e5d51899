"""An engine's own cores, with real processes and a real claim."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from programs import ROOT, start_python
from transformers import AutoModelForCausalLM

from asyncrl.cluster import cores
from asyncrl.cluster.placement import place
from asyncrl.cluster.processes import run_on
from asyncrl.config import Config
from asyncrl.job.node import Leader
from asyncrl.trainer.model import layers_of
from asyncrl.trainer.sharding import needs_sharding, shard, trainer_mesh

ALLOWED = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(
    len(ALLOWED) < 2, reason="one core, which nobody can have alone"
)


@pytest.fixture(autouse=True)
def claim(monkeypatch):
    """A claim that no run of this machine is after, and all cores again at the end."""
    monkeypatch.setattr(cores, "CLAIM", f"\0engine-cores of test {os.getpid()}")
    yield
    run_on(os.getpid(), ALLOWED)


@pytest.fixture
def num_threads():
    yield (before := torch.get_num_threads())
    torch.set_num_threads(before)


def on_cpu(num_ranks=1, **options):
    return place(Config(**options), 0, len(ALLOWED), num_ranks)


def cores_of(placement):
    return [worker.cores for worker in placement.workers]


@needs_two_cores
def test_an_engine_has_cores_of_its_own_unless_another_run_has_them():
    """The trainer leaves them until the end. A run has them until it has ended or died."""
    claiming = (
        "import sys; from contextlib import ExitStack; from asyncrl.cluster.placement import place\n"
        "from asyncrl.config import Config; from asyncrl.cluster import cores\n"
        f"cores.CLAIM = {cores.CLAIM!r}\n"
        f"placed = cores.claim_cores(place(Config(), 0, {len(ALLOWED)}, 1), on_end := ExitStack())\n"
        "print(placed.workers[0].cores, flush=True); sys.stdin.read()"
    )
    first = start_python("-c", claiming)
    try:
        assert first.stdout.readline() != "()\n"
        with ExitStack() as on_end:
            shared = cores.claim_cores(on_cpu(), on_end)
            assert cores_of(shared) == [()]
            cores.leave_cores(shared, on_end)
            assert os.sched_getaffinity(0) == set(ALLOWED)
    finally:
        first.kill()
        first.communicate()
    for _ in range(2):
        with ExitStack() as on_end:
            placement = cores.claim_cores(on_cpu(), on_end)
            (own,) = cores_of(placement)
            assert len(own) == placement.workers[0].cpu_threads and set(own) < set(ALLOWED)
            assert os.sched_getaffinity(0) == set(ALLOWED), "starting takes all"
            left = set(ALLOWED) - set(own)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(os.getpid).result()  # the thread has begun
                cores.leave_cores(placement, on_end)
                assert thread.submit(os.sched_getaffinity, 0).result() == left
            assert os.sched_getaffinity(0) == left
        assert os.sched_getaffinity(0) == set(ALLOWED)


@needs_two_cores
def test_a_trainer_computes_on_the_cores_of_an_idle_engine(num_threads):
    with ExitStack() as on_end:
        shared = on_cpu()
        cores.use_free_cores(shared, engine_is_idle=True)
        assert torch.get_num_threads() == num_threads, "no core is the engine's own"
        placement = cores.claim_cores(shared, on_end)
        (own,) = cores_of(placement)
        torch.set_num_threads(placement.trainer_threads)
        cores.leave_cores(placement, on_end)
        for engine_is_idle in (False, True, True, False):
            cores.use_free_cores(placement, engine_is_idle=engine_is_idle)
            more = len(own) if engine_is_idle else 0
            assert torch.get_num_threads() == placement.trainer_threads + more
            assert len(os.sched_getaffinity(0)) == len(ALLOWED) - len(own) + more


@pytest.mark.parametrize(
    ("options", "gpus", "num_cores", "ranks"),
    [
        ({}, 1, 16, 1),
        ({}, 0, 16, 2),
        ({"num_rollout_workers": 2}, 0, 16, 1),
        ({}, 0, 64 * len(ALLOWED), 1),
    ],
    ids=["GPU", "two ranks", "two engines", "more threads than cores"],
)
def test_nothing_is_claimed_where_cores_are_not_one_engines_and_one_ranks(
    options, gpus, num_cores, ranks
):
    placed = place(Config(**options), gpus, num_cores, ranks)
    with ExitStack() as on_end:
        assert cores.claim_cores(placed, on_end) == placed
        with socket.socket(socket.AF_UNIX) as free:
            free.bind(cores.CLAIM)


@needs_two_cores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["plain", "sharded"])
def test_each_layer_takes_the_cores_of_an_idle_engine_in_both_passes(dtype, num_threads, one_rank):
    """The engine has work in the first layer's forward pass only."""
    with ExitStack() as on_end:
        placement = cores.claim_cores(on_cpu(), on_end)
        (own,) = cores_of(placement)
        torch.set_num_threads(placement.trainer_threads)
        answers = iter([False, True, True, True])
        controller = SimpleNamespace(is_idle=lambda: next(answers))
        model = AutoModelForCausalLM.from_pretrained(ROOT / "data/tiny/addition")
        layers = layers_of(model)[:2]
        model.model.layers = torch.nn.ModuleList(layers)
        mesh = trainer_mesh(1, torch.device("cpu"))
        if needs_sharding(mesh, dtype, offload=False):
            shard([*layers, model], mesh, dtype, offload=False)
        leader = SimpleNamespace(placement=placement, controller=controller, on_end=on_end)
        Leader.share_cores(leader, model)
        threads = []
        for layer in layers:
            layer.register_forward_hook(lambda *_: threads.append(torch.get_num_threads()))
            layer.register_full_backward_hook(lambda *_: threads.append(torch.get_num_threads()))
        model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()
        few = placement.trainer_threads
        assert threads == [few] + [few + len(own)] * 3
        assert next(answers, None) is None, "each layer asks once a pass"
