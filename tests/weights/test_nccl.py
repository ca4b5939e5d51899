"""The nccl transport with both ends on the CPU: everything but NCCL itself, for which see tests/gpu/."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from fake_link import FakeEngine, SocketLink

from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.transport import ParameterSpec

SPECS = [ParameterSpec("a", torch.float32, (3, 5)), ParameterSpec("b", torch.bfloat16, (7,))]


def parameters(value):
    return [("a", torch.full((3, 5), value)), ("b", torch.full((7,), value))]


@contextmanager
def transport(ranks_per_worker=1, timeout_s=10.0, link=SocketLink):
    made = NcclTransport(SPECS, torch.device("cpu"), ranks_per_worker, timeout_s, link)
    try:
        yield made
    finally:
        made.close()
        wait_until(
            lambda: (
                not any(
                    thread.name.startswith("send-to-worker") for thread in threading.enumerate()
                )
            )
        )


def connect(transport, worker=0, num_ranks=1):
    """Engines of one worker, all joined."""
    engines = [FakeEngine(rank) for rank in range(num_ranks)]
    info = transport.init_info(worker)
    for engine in engines:
        engine.init_weight_transfer_engine(info)
    return engines


def receive(transport, engines, staged, worker=0):
    """What controller and worker do between Receiving and Updated; all ranks of an engine at the same time."""
    transport.acquire(staged)
    transport.send(worker, staged)
    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(lambda engine: engine.update(staged.messages), engines))
    transport.release(staged)
    transport.check()


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_rank_of_an_engine_gets_each_version_in_the_dtype_that_is_sent():
    with transport(ranks_per_worker=2) as sent:
        engines = connect(sent, num_ranks=2)
        for version in range(3):
            staged = sent.stage(version, parameters(version + 0.5))
            sent.announce(staged)
            receive(sent, engines, staged)
            for engine in engines:
                assert (engine.floats("a") == version + 0.5).all()
                b = torch.full((7,), version + 0.5, dtype=torch.bfloat16)
                assert engine.weights["b"] == b.view(torch.uint8).numpy().tobytes()


def test_weights_are_staged_when_the_slowest_worker_has_received_the_last_ones():
    with transport() as sent:
        (quick,), (slow,) = connect(sent, 0), connect(sent, 1)
        first = sent.stage(0, parameters(0.0))
        sent.announce(first)
        sent.acquire(first)
        receive(sent, [quick], first, worker=0)
        assert not sent.reserve(), "it is being sent"
        with pytest.raises(RuntimeError, match="no weight buffer is free"):
            sent.stage(1, parameters(1.0))
        sent.send(1, first)
        slow.update(first.messages)
        assert not slow.floats("a").any()
        sent.release(first)
        assert sent.reserve()


def test_the_trainer_does_not_wait_for_a_worker_that_receives_late():
    with transport() as sent:
        (engine,) = connect(sent)
        staged = sent.stage(0, parameters(2.0))
        receives = threading.Event()
        late = threading.Timer(2.0, lambda: (receives.set(), engine.update(staged.messages)))
        late.start()
        sent.send(0, staged)
        assert not receives.is_set()
        late.join()
        assert (engine.floats("a") == 2.0).all()


def test_a_worker_that_starts_again_joins_a_new_group_and_no_other_notices():
    with transport() as sent:
        (lost,), (other,) = connect(sent, 0), connect(sent, 1)
        staged = sent.stage(0, parameters(1.0))
        sent.send(0, staged)  # never received: it died
        sent.drop(0)
        sent.check()
        receive(sent, [other], staged, worker=1)
        (again,) = connect(sent, 0)
        receive(sent, [again], staged, worker=0)
        assert not lost.weights and again.weights == other.weights and again.weights


def test_a_worker_that_never_joins_and_one_that_never_receives_are_named():
    with transport(timeout_s=0.2) as sent:
        sent.init_info(3)
        time.sleep(0.25)
        with pytest.raises(
            TimeoutError, match="joining rollout worker 3's NCCL group takes too long"
        ):
            sent.check()
    with transport(timeout_s=1.0) as sent:
        connect(sent, 2)
        sent.send(2, sent.stage(0, parameters(0.0)))
        time.sleep(1.2)
        with pytest.raises(
            TimeoutError, match="sending weights to rollout worker 2 by NCCL takes too long"
        ):
            sent.check()


def test_an_error_of_the_link_is_the_runs_error_unless_the_worker_is_gone():
    def broken(*_):
        raise OSError("no such device")

    def failed():
        try:
            sent.check()
        except RuntimeError as error:
            return "group failed: no such device" in str(error)
        return False

    with transport(link=broken) as sent:
        sent.init_info(0)
        wait_until(failed)
        sent.drop(0)
        sent.check()
