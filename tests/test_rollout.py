"""A rollout worker on an environment of turns, driven as the controller does; its engine samples random words."""

import asyncio
import contextlib
import itertools
import os
import queue
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_engine import SamplingEngine, random_tokens

import rollout
from asyncrl.cluster.gpus import Gpu
from asyncrl.cluster.placement import WorkerPlacement, WorkerSpec
from asyncrl.config import Config
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.vllm_setup import worker_environment
from asyncrl.messages import (
    Abort,
    Finished,
    InFlight,
    LoadWeights,
    Ready,
    ReportProgress,
    Stop,
    Stopped,
    Suspend,
    Tickets,
    WeightsLoaded,
)
from asyncrl.records import EVALUATION_GROUP, Ticket
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.environments import ENVIRONMENTS
from extras.baselines import Proceed, Waiting
from extras.conversation import Conversation
from rollout import start_worker
from scripts.latency import run_latency_worker

TASK = "frozen_lake"


def make_tickets(size, version):
    """Tickets of groups of that size without end, which want weights of that version."""
    for number in itertools.count():
        group, member = divmod(number, size)
        yield Ticket(number, group, member, 1, 0, (), "", 100 + group, number, version)


class QueuePipe:
    """One end of a pipe. Its messages may all be there from the start."""

    def __init__(self, inbox=None, outbox=None):
        self.inbox, self.outbox = inbox or queue.SimpleQueue(), outbox or queue.SimpleQueue()
        self.send, self.recv = self.outbox.put, self.inbox.get


async def serve(engine, pipe, config, start=start_worker):
    """Be a worker with that engine, to its end."""
    placement = WorkerPlacement(0, None, None, 1, 0.0)
    spec = WorkerSpec(config, placement, resolve_model("tiny", TASK), "shm", "")

    async def start_proxy(spec, stop_token_ids):
        return LLMProxy(spec.config, engine, stop_token_ids)

    await (await start(spec, pipe, start_proxy)).serve()


class Driver:
    """The controller's end of the pipe of a worker, which runs in a thread."""

    def __init__(self, config):
        self.config, self.tokenizer = config, load_tokenizer(resolve_model("tiny", TASK))
        words = self.tokenizer.convert_tokens_to_ids(list(ENVIRONMENTS[TASK].ACTIONS))
        eos = self.tokenizer.eos_token_id
        self.engine = SamplingEngine(random_tokens(random.Random(0), words, eos), eos)
        self.pipe = QueuePipe()
        theirs = QueuePipe(self.pipe.outbox, self.pipe.inbox)
        program = run_latency_worker("constant:0.02")
        serving = serve(self.engine, theirs, config, program.keywords["start"])
        self.end = ThreadPoolExecutor(1).submit(asyncio.run, serving)

    def receive(self):
        return self.pipe.inbox.get(timeout=60)

    def finish(self, tickets, evaluation):
        """Open the barrier whenever all wait. Returns what has finished, and who had sampled at each opening."""
        self.pipe.send(Tickets([*tickets, evaluation]))
        finished, waiting, openings = [], set(), []
        running = {ticket.ticket_id for ticket in tickets}
        while running or len(finished) <= len(tickets):
            match self.receive():
                case Finished(trajectories):
                    finished += trajectories
                    running -= {trajectory.ticket_id for trajectory in trajectories}
                case Waiting(ticket_ids):
                    assert not waiting & set(ticket_ids), "nobody takes a turn twice before all"
                    waiting |= set(ticket_ids)
            if running and running == waiting & running:
                assert evaluation.ticket_id not in waiting
                names = {int(request.name.split(".")[0]) for request in self.engine.requests}
                openings.append(names - {evaluation.ticket_id})
                waiting.clear()
                self.pipe.send(Proceed())
        return finished, openings


@pytest.fixture(params=["lockstep", "batch"])
def driver(request):
    limits = {"max_prompt_tokens": 64, "max_response_tokens": 400}
    driver = Driver(Config(task=TASK, group_size=8, scheduling=request.param, **limits))
    yield driver
    if not driver.end.done():
        driver.pipe.send(Stop())


def test_trajectories_are_what_environments_answer_and_wait_for_each_other_but_for_evaluations(
    driver,
):
    assert isinstance(driver.receive(), Ready)
    driver.pipe.send(LoadWeights(3, [{"version": 3}], ()))
    message = driver.receive()
    assert isinstance(message, WeightsLoaded) and message.version == 3
    *tickets, last = itertools.islice(make_tickets(8, 3), 17)
    evaluation = replace(last, group_id=EVALUATION_GROUP)
    trajectories, openings = driver.finish(tickets, evaluation)
    conversation, environment = Conversation(driver.tokenizer), ENVIRONMENTS[TASK]()
    for trajectory in trajectories:
        observation, _ = environment.reset(seed=100 + trajectory.ticket_id // 8)
        first = conversation.first(observation)
        assert trajectory.tokens[: len(first)].tolist() == first
        assert trajectory.loss_mask[len(first)]
    trained = [t for t in trajectories if t.group_id != EVALUATION_GROUP]
    assert len(openings) == max(trajectory.num_turns for trajectory in trained) > 1
    assert len(openings[0]) == (0 if driver.config.scheduling == "lockstep" else len(tickets))


UUIDS = [f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "ba"]


@pytest.mark.parametrize(
    ("visible", "gpu", "num_gpus", "expected"),
    [
        (None, 2, 2, "2,3"),
        ("4,5,6,7", 2, 2, "6,7"),
        ("MIG-a, MIG-b", 1, 1, "MIG-b"),
        ("GPU-b,GPU-a", 1, 1, UUIDS[1]),
    ],
)
def test_an_engine_sees_its_own_gpus_and_no_other_by_uuids_in_full(
    monkeypatch, visible, gpu, num_gpus, expected
):
    gpus = [Gpu("NVIDIA H200", 2, 1, uuid) for uuid in UUIDS]
    monkeypatch.setattr("asyncrl.engine.vllm_setup.list_gpus", {"GPU-b,GPU-a": gpus}.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment = worker_environment(WorkerPlacement(0, gpu, None, 1, 0.9, num_gpus))
    assert environment["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "corp"}, "corp,127.0.0.1,localhost"),
        ({"NO_PROXY": "corp", "no_proxy": "lab"}, "lab,127.0.0.1,localhost"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_a_worker_reaches_its_own_host_past_a_proxy(monkeypatch, given, expected):
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    for variable, hosts in given.items():
        monkeypatch.setenv(variable, hosts)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    environment = worker_environment(WorkerPlacement(0, None, None, 1, 0.0))
    assert environment["NO_PROXY"] == environment["no_proxy"] == expected
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert urllib.request.proxy_bypass("127.0.0.1:8000")


class MortalEngine(SamplingEngine):
    """Answers no call for weights, ends no request, and dies once a worker has sent so many messages."""

    def __init__(self, pipe, num_messages):
        super().__init__(None, None)
        self.pipe, self.num_messages, self.dies_at = pipe, num_messages, time.monotonic() + 0.3
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})

    @property
    def errored(self):
        return self.pipe.outbox.qsize() == self.num_messages and time.monotonic() > self.dies_at

    async def hang(self, *arguments, **options):
        await asyncio.Event().wait()

    is_sleeping = pause_scheduler_async = hang

    async def generate(self, *arguments):
        yield await self.hang()


DEAD = pytest.raises(RuntimeError, match="the engine is dead")


@pytest.mark.parametrize(
    ("messages", "answers", "end"),
    [
        ([], [Ready], DEAD),
        ([Suspend()], [Ready], DEAD),
        ([LoadWeights(0, [], ()), ReportProgress()], [Ready, InFlight], DEAD),
        ([Stop()], [Ready, Stopped], contextlib.nullcontext()),
    ],
)
def test_a_worker_ends_with_its_engine_or_when_it_is_told_to_whatever_it_waits_for(
    messages, answers, end
):
    """It says how far responses are while an update still waits for them."""
    config, pipe = Config(task=TASK, max_prompt_tokens=64, timeout_s=90), QueuePipe()
    engine = MortalEngine(pipe, len(answers))
    for message in (Tickets([next(make_tickets(1, -1))]), *messages):
        pipe.inbox.put(message)
    with end:
        asyncio.run(asyncio.wait_for(serve(engine, pipe, config), 20))
    assert said_in(pipe) == answers and engine.is_shut_down


def test_an_update_that_waits_for_responses_does_not_wait_for_one_that_is_aborted():
    config = Config(
        task=TASK, on_update="wait", max_prompt_tokens=64, max_response_tokens=16_000, timeout_s=90
    )
    pipe, ticket = QueuePipe(), next(make_tickets(1, -1))
    info = {"trainer_version": 0, "evaluate": False}

    def choose(prompt, num_sampled):
        if not num_sampled:
            for message in (LoadWeights(1, [info | {"version": 1}], ()), Abort([0]), Stop()):
                pipe.inbox.put(message)
        return 0

    engine = SamplingEngine(choose, eos=1)
    pipe.inbox.put(LoadWeights(0, [info | {"version": 0}], ()))
    pipe.inbox.put(Tickets([ticket]))
    asyncio.run(asyncio.wait_for(serve(engine, pipe, config), 20))
    messages = [pipe.outbox.get() for _ in range(pipe.outbox.qsize())]
    (finished,) = (message for message in messages if isinstance(message, Finished))
    assert finished.trajectories[0].finish_reason == "aborted"
    assert len(engine.requests[0].rows) < 16_000


def test_trajectories_wait_for_the_next_message_but_not_the_last_one(monkeypatch):
    """Nobody waits for FLUSH_S here: it is longer than the test."""
    monkeypatch.setattr(rollout, "FLUSH_S", 90)
    config = Config(task=TASK, max_prompt_tokens=64, max_response_tokens=10**6, timeout_s=90)
    info = {"trainer_version": 0, "evaluate": False}
    loads = [LoadWeights(version, [info | {"version": version}], ()) for version in (0, 1)]
    tickets = list(itertools.islice(make_tickets(1, -1), 3))
    pipe, steps = QueuePipe(), [(3, Abort([0])), (2, Abort([1])), (1, loads[1])]

    def choose(prompt, num_sampled):
        if steps and len(engine.running) == steps[0][0]:
            pipe.inbox.put(steps.pop(0)[1])
        return 0

    engine = SamplingEngine(choose, eos=1)
    theirs = QueuePipe(pipe.inbox, pipe.outbox)
    for message in (loads[0], Tickets(tickets)):
        pipe.inbox.put(message)
    end = ThreadPoolExecutor(1).submit(asyncio.run, serve(engine, theirs, config))
    messages = []
    while not messages or getattr(messages[-1], "version", 0) != 1:
        messages.append(pipe.outbox.get(timeout=60))
    pipe.inbox.put(Abort([2]))
    messages.append(pipe.outbox.get(timeout=60))
    pipe.inbox.put(Stop())
    end.result(timeout=60)
    kinds = [type(message) for message in messages]
    assert kinds == [Ready, WeightsLoaded, Finished, WeightsLoaded, Finished]
    ended = [[t.ticket_id for t in m.trajectories] for m in messages if type(m) is Finished]
    assert ended == [[0, 1], [2]]


def test_a_message_that_cannot_be_read_or_is_unknown_ends_the_worker():
    class Unreadable(QueuePipe):
        def __init__(self):
            super().__init__()
            self.recv = self.fail

        def fail(self):
            raise AttributeError("no such class")

    config = Config(task=TASK, max_prompt_tokens=64, timeout_s=90)
    for pipe, error in ((Unreadable(), "no such class"), (QueuePipe(), "unknown message: 'hello'")):
        pipe.inbox.put("hello")
        with pytest.raises((AttributeError, RuntimeError), match=error):
            asyncio.run(asyncio.wait_for(serve(SamplingEngine(None, None), pipe, config), 20))


def said_in(pipe):
    """Kinds of messages."""
    return [type(pipe.outbox.get()) for _ in range(pipe.outbox.qsize())]


def test_what_may_start_threads_is_started_after_the_engine_is_forked_and_before_the_worker_is_ready(
    monkeypatch,
):
    """A PYTHONSAFEPATH of the user's stays."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    placement, model = WorkerPlacement(0, None, None, 1, 0.0), resolve_model("tiny", TASK)
    steps, pipe = [], QueuePipe()

    async def start_proxy(spec, stop_token_ids):
        steps.append("engine")

    def start_environments(spec, tokenizer):
        steps.append(f"environments, then {pipe.outbox.qsize()} messages")

    spec = WorkerSpec(Config(), placement, model, "shm", "")
    asyncio.run(start_worker(spec, pipe, start_proxy, start_environments))
    assert steps == ["engine", "environments, then 0 messages"]
    assert os.environ["PYTHONSAFEPATH"] == "1"
    assert said_in(pipe) == [Ready]
