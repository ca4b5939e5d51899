"""A rollout worker on an environment of turns, driven as the controller does; its engine samples random words."""

import asyncio
import dataclasses
import pickle
import queue
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import SamplingEngine

from asyncrl.cluster.gpus import Gpu
from asyncrl.cluster.placement import WorkerPlacement, WorkerSpec
from asyncrl.config import Config
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.tickets import TicketSource
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.vllm_setup import worker_environment
from asyncrl.messages import (
    Cut,
    Finished,
    InFlight,
    Ready,
    Stop,
    Stopped,
    Suspend,
    Tickets,
    Update,
    Updated,
)
from asyncrl.tasks import load_task
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.conversation import Conversation
from data.environments import ENVIRONMENTS
from extras.baselines import Proceed, Waiting
from rollout import start_worker
from scripts.latency import run_latency_worker

TASK = "frozen_lake"


def ticket_source(config):
    """What makes the tickets of a run with these options."""
    task, tokenizer = load_task(TASK, seed=0), load_tokenizer(resolve_model("tiny", TASK))
    encode = lambda problem: task.encode_prompt(problem, tokenizer)  # noqa: E731
    return TicketSource(config, PromptSource(task.train_problem, task.eval_problems(4), encode))


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
    """The controller's end of the pipe of a worker, which runs in a thread, until an update has been loaded."""

    def __init__(self):
        self.config = Config(
            task=TASK,
            group_size=8,
            scheduling="lockstep",
            on_update="resume",
            max_prompt_tokens=64,
            max_response_tokens=400,
        )
        self.tickets = ticket_source(self.config)
        self.tokenizer = load_tokenizer(resolve_model("tiny", TASK))
        words = self.tokenizer.convert_tokens_to_ids(list(ENVIRONMENTS[TASK].ACTIONS))
        engine = SamplingEngine(random.Random(0), words, self.tokenizer.eos_token_id)
        self.pipe = QueuePipe()
        theirs = QueuePipe(self.pipe.outbox, self.pipe.inbox)
        program = pickle.loads(pickle.dumps(run_latency_worker("constant:0.02")))
        self.thread = ThreadPoolExecutor(1)
        serving = serve(engine, theirs, self.config, program.keywords["start"])
        self.end = self.thread.submit(asyncio.run, serving)
        self.reports, self.version = [], 3
        assert isinstance(self.receive(), Ready)
        self.pipe.send(Update(self.version, [{"version": self.version}], ()))
        message = self.receive()
        assert isinstance(message, Updated) and message.version == self.version

    def receive(self):
        message = self.pipe.inbox.get(timeout=60)
        if getattr(message, "activity", None) is not None:
            self.reports.append(message.activity)
        return message

    def start_group(self, group_id):
        tickets = self.tickets.for_group(group_id, group_id, self.version)
        self.pipe.send(Tickets(tickets))
        return tickets

    def finish(self, running):
        """Open the barrier whenever all wait. Returns what has finished, and how often it was opened."""
        finished, waiting, num_barriers = [], set(), 0
        while running - {t.ticket_id for t in finished}:
            match self.receive():
                case Finished(trajectories):
                    finished += trajectories
                case Waiting(ticket_ids):
                    assert not waiting & set(ticket_ids), (
                        "nobody takes a turn twice before all have taken it"
                    )
                    waiting |= set(ticket_ids)
            left = running - {t.ticket_id for t in finished}
            if left and left <= waiting:
                num_barriers += 1
                waiting.clear()
                self.pipe.send(Proceed())
        return finished, num_barriers


@pytest.fixture(scope="module")
def driver():
    driver = Driver()
    yield driver
    if not driver.end.done():
        driver.pipe.send(Stop())
    driver.thread.shutdown()


def turns_of(trajectory):
    """[start, end) of every turn of the policy."""
    edges = np.flatnonzero(np.diff([0, *trajectory.loss_mask.astype(int), 0]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def test_a_trajectory_is_what_the_environment_answers_and_all_take_a_turn_before_any_takes_the_next(
    driver,
):
    tickets = {ticket.ticket_id: ticket for i in (0, 1) for ticket in driver.start_group(i)}
    conversation = Conversation(driver.tokenizer)
    trajectories, num_barriers = driver.finish(set(tickets))  # `finish` asserts the order
    assert num_barriers == max(t.num_turns for t in trajectories) > 1
    for trajectory in trajectories:
        environment = ENVIRONMENTS[TASK]()
        seed = tickets[trajectory.ticket_id].environment_seed
        observation, _ = environment.reset(seed=seed)
        first, total, turns = conversation.first(observation), 0.0, turns_of(trajectory)
        assert trajectory.tokens[: len(first)].tolist() == first
        assert len(turns) == trajectory.num_turns
        for start, end in turns:
            written = trajectory.tokens[start:end].tolist()
            response = driver.tokenizer.decode(written, skip_special_tokens=True)
            _, reward, terminated, truncated, _ = environment.step(response)
            total += reward
        assert terminated or truncated
        assert (trajectory.reward, trajectory.finish_reason) == (total, "stop")


def test_what_it_has_been_doing_is_reported_in_order_and_without_a_gap(driver):
    times = [
        time
        for report in driver.reports
        for time in [*(change[0] for change in report.changes), report.until]
    ]
    assert times == sorted(times)
    states = {(state, reason) for report in driver.reports for _, state, reason in report.changes}
    assert states == {
        ("starved", ""), ("decoding", ""), ("environment", ""), ("starved", "barrier"), ("paused", "update"),
    }  # fmt: skip


def test_a_ticket_for_weights_that_are_still_to_come_ends_the_worker(driver):
    """Last, as the worker is gone then: messages are acted on in order, so this cannot happen by chance."""
    (ticket, *_) = driver.tickets.for_group(9, 9, driver.version)
    driver.pipe.send(Tickets([dataclasses.replace(ticket, min_version=driver.version + 1)]))
    with pytest.raises(RuntimeError, match=f"needs version {driver.version + 1}"):
        driver.end.result(timeout=60)


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


class MortalEngine(SamplingEngine):
    """Answers no call for weights, ends no request, and dies after a while, or when it is killed."""

    def __init__(self, lifetime_s, is_killed=lambda: False):
        super().__init__(None, (), None)
        self.dies_at = time.monotonic() + lifetime_s
        self.is_killed = is_killed
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})

    @property
    def errored(self):
        return self.is_killed() or time.monotonic() > self.dies_at

    async def hang(self, *arguments, **options):
        await asyncio.Event().wait()

    is_sleeping = pause_scheduler_async = hang

    async def generate(self, *arguments):
        yield await self.hang()


def serve_at_once(engine, messages, pipe=None):
    """Have a worker with that engine and all messages serve to the end, which comes soon. Returns its pipe."""
    pipe = pipe or QueuePipe()
    for message in messages:
        pipe.inbox.put(message)
    config = Config(task=TASK, max_prompt_tokens=64, timeout_s=90)
    asyncio.run(asyncio.wait_for(serve(engine, pipe, config), 20))


@pytest.fixture
def ticket():
    return ticket_source(Config(task=TASK, max_prompt_tokens=64)).for_group(0, 0, -1)[0]


@pytest.mark.parametrize("message", [None, Suspend(), Update(0, [], ())])
def test_a_worker_whose_engine_dies_ends_at_once_whatever_it_waits_for(message, ticket):
    engine = MortalEngine(0.3)
    with pytest.raises(RuntimeError, match="the engine is dead"):
        serve_at_once(engine, [Tickets([ticket]), *([message] if message else [])])
    assert engine.is_shut_down


def test_how_far_responses_are_is_said_while_an_update_still_waits_for_them(ticket):
    pipe = QueuePipe()
    engine = MortalEngine(15, is_killed=lambda: pipe.outbox.qsize() == 2)
    with pytest.raises(RuntimeError, match="the engine is dead"):
        serve_at_once(engine, [Tickets([ticket]), Update(0, [], ()), Cut()], pipe)
    ready, in_flight = said_in(pipe)
    assert (type(ready), type(in_flight)) == (Ready, InFlight)
    # nothing is known of a ticket that has not begun yet
    assert in_flight.lost in ({ticket.ticket_id: 0}, {})


def test_a_worker_that_is_told_to_stop_waits_for_no_ticket(ticket):
    engine, pipe = MortalEngine(60), QueuePipe()
    serve_at_once(engine, [Tickets([ticket]), Stop()], pipe)
    assert list(map(type, said_in(pipe))) == [Ready, Stopped] and engine.is_shut_down


def said_in(pipe):
    return [pipe.outbox.get() for _ in range(pipe.outbox.qsize())]


def test_what_may_start_threads_is_started_after_the_engine_is_forked_and_before_the_worker_is_ready():
    placement, model = WorkerPlacement(0, None, None, 1, 0.0), resolve_model("tiny", TASK)
    steps, pipe = [], QueuePipe()

    async def start_proxy(spec, stop_token_ids):
        steps.append("engine")

    def start_environments(spec, tokenizer):
        steps.append(f"environments, then {pipe.outbox.qsize()} messages")

    spec = WorkerSpec(Config(), placement, model, "shm", "")
    asyncio.run(start_worker(spec, pipe, start_proxy, start_environments))
    assert steps == ["engine", "environments, then 0 messages"]
    assert list(map(type, said_in(pipe))) == [Ready]
