"""A random walk over the real controller: every message, token, death and load is an event, in any order that a real
system allows, on any options that Config accepts; an oracle that shares no state with it checks what comes out.

WALKS in the environment sets how many walks there are, of which a fifth are not slow; each has the seed by which it can
be made again. The rarest of the faults that were once planted showed in 5 walks of 1,000.
"""

import copy
import math
import os
import random
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from walk_oracle import Oracle, WatchedTickets
from walk_worker import WalkProcess, WalkSwarmWorkers, WalkWorkers

from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config, SwarmOptions
from asyncrl.controller.controller import Controller
from asyncrl.controller.cut import ControllerState
from asyncrl.controller.tickets import PromptSource
from asyncrl.controller.workers import MAX_RESTARTS
from asyncrl.messages import Finished, InFlight, Updated
from asyncrl.runlog import plain
from asyncrl.weights.transport import Announcement, Buffers, Staged
from data.problem import Problem
from extras.baselines import BaselineController
from extras.swarm.controller import Disbelieved, SwarmController
from extras.swarm.pull import PullTransport
from extras.swarm.remote import RemoteWorker

NUM_WALKS = int(os.environ.get("WALKS", 1250))
NUM_CHUNKS = 10
MAX_EVENTS = 100_000
RARE = {"die": 0.01, "cut": 0.05, "crash": 0.02}


def is_remote(worker):
    """Whether it is of a host that has joined."""
    return isinstance(worker, RemoteWorker)


def draw_options(rng):
    """Options of a run, legal or not."""
    over_sampling = rng.choice([1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 4.0])
    group_size = rng.randint(1, 3)
    return {
        "steps": rng.randint(3, 7),
        "groups_per_step": rng.randint(1, 3),
        "group_size": group_size,
        "advantage": "grpo" if group_size > 1 else "reinforce",
        "async_ratio": 0.0
        if over_sampling > 1
        else rng.choice([0.0, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0]),
        "stale_policy": rng.choice(["wait", "wait", "wait", "drop", "gate"]),
        "publish_delay": rng.choice([0, 0, 1, 2, 3]),
        "on_update": rng.choice(["keep", "recompute", "resume", "restart", "wait"]),
        "scheduling": rng.choice(["queue", "queue", "batch", "lockstep"]),
        "replicate_prompts": rng.random() < 0.7,
        # of one response alone none would be left
        "drop_zero_variance": group_size > 1 and rng.random() < 0.25,
        "extra_groups": rng.choice([0, 0, 0, 1, 3]),
        "extra_members": rng.choice([0, 0, 0, 1, 2]),
        "over_sampling": over_sampling,
        "max_running_requests": rng.choice([1, 2, 3, 16]),
        "task": rng.choice(["addition", "guess_number"]),
        "eval_every": rng.choice([0, 1, 2, 3]),
        "listen": rng.choice([None, None, "here:1"]),
        "swarm": SwarmOptions(refresh_lag=rng.choice([0, 0, 1, 2, 4])),
        "eval_greedy": rng.random() < 0.3,
    }


def draw_config(rng):
    """The first options drawn that a run may have."""
    while True:
        try:
            return Config(**draw_options(rng)).checked()
        except ValueError:
            continue


class WalkTransport(Buffers):
    """Buffers of which only the version is kept."""

    def __init__(self, oracle, num_buffers):
        super().__init__(num_buffers)
        self.oracle = oracle

    def init_info(self, worker):
        return {}

    def announce(self, staged):
        super().announce(staged)
        (info,) = staged.messages
        self.oracle.announce(info["version"], info["trainer_version"], info["evaluate"])


@dataclass
class Saved:
    """What a checkpoint has, and what was true then."""

    state: bytes
    oracle: Oracle
    num_lost: int
    version: int
    is_last: bool
    evaluations: list


class Walk:
    """One run, an event at a time; all of it may be thrown away and gone on with from a checkpoint."""

    def __init__(self, config, num_workers, num_eval_problems, rng):
        self.config, self.rng = config, rng
        self.num_workers, self.num_eval_problems, self.steps = (
            num_workers,
            num_eval_problems,
            config.steps,
        )
        self.failure_share = rng.choice([0.0, 0.0, 0.1])
        self.weights = {}
        self.deaths_left = rng.randint(0, MAX_RESTARTS)
        self.joins_left = rng.randint(0, 4) if config.listen else 0
        self.cuts_left, self.crashes_left, self.saved = (
            rng.choice([0, 3, 12]),
            rng.choice([1, 4]),
            None,
        )
        self.refusals_left = rng.choice([0, 2, 5]) if config.listen else 0
        self.is_to_be_longer = rng.random() < 0.2
        # machines that join have theirs
        self.num_buffers = 2 if config.listen else rng.choice([1, 2])
        self._begin(Oracle(config, num_eval_problems), None)

    def _begin(self, oracle, state):
        """Start the processes of a run, a new one if there is no state."""
        config, self.oracle, self.state = self.config, oracle, state
        self.buffers, self.transport = [None, None], WalkTransport(oracle, self.num_buffers)
        self.delivering, self.said_lost = {}, {}
        prompts = PromptSource(
            train_problem=lambda index: Problem(
                "", str(index), index if config.is_multi_turn else None
            ),
            eval_problems=[Problem("", str(-1 - index)) for index in range(self.num_eval_problems)],
            encode=lambda problem: [2, 3],
        )
        tickets = WatchedTickets(config, prompts)
        tickets.oracle = oracle
        placed = tuple(
            WorkerPlacement(index, None, None, 1, 0.0) for index in range(self.num_workers)
        )
        kinds = (WalkWorkers, BaselineController if config.is_baseline else Controller)
        if config.listen:
            kinds = (WalkSwarmWorkers, SwarmController)
        workers = kinds[0](self, config, Placement((None,), 1, placed, "shm"))
        self.controller = kinds[1](config, workers, tickets, self._record, restored=state)
        self.is_ending_leases = False
        if config.listen:
            self.controller.pulled = PullTransport([])
            end_leases = self.controller.dispatcher.end_leases
            # also when a message comes
            self.controller.dispatcher.end_leases = lambda: self._note_leases(end_leases)
        self.controller.launch()
        self.version, self.trainer, self.evaluations = 0, "connecting", []

    # Events

    def run(self):
        """Until all steps are made and the last evaluation has ended."""
        for _ in range(MAX_EVENTS):
            if self.trainer == "finishing" and self.controller.evaluation is None:
                self._check_end()
                if not self.is_to_be_longer:
                    return
                self.is_to_be_longer = False
                self._cut()
                self._crash()
            events = [*self.events_of_workers()]
            if self.trainer == "waiting" and not events and [*self.controller.workers]:
                assert self.take(), (
                    f"nothing can happen any more: {self.controller.dispatcher.describe()}"
                )
            else:
                events += self._events_of_trainer()
                assert events, (
                    f"nothing can happen any more: {self.trainer}, {self.controller.dispatcher.describe()}"
                )
                self.act(events)
            self.oracle.check()
        raise AssertionError(
            f"no end after {MAX_EVENTS} events: {self.controller.dispatcher.describe()}"
        )

    def act(self, events):
        """Let one of them happen."""
        self._choose(events)()

    def _choose(self, events):
        """Events of the same kind and worker are as fast as each other; of the others some are far slower in a walk."""
        for kind, _ in events:
            if kind not in self.weights:
                self.weights[kind] = self.rng.choice([0.03, 0.3, 1.0, 1.0])
        weights = [RARE.get(kind[0], self.weights[kind]) for kind, _ in events]
        return self.rng.choices([event for _, event in events], weights)[0]

    def events_of_workers(self):
        for worker in list(self.controller.workers):
            process = worker.process
            for kind, event in process.events():
                yield (kind, worker.index), event
            if process.outbox:
                yield ("deliver", worker.index), lambda worker=worker: self._deliver(worker)

    def _events_of_trainer(self):
        match self.trainer:
            case "connecting" if not self.controller.workers.starting:
                yield ("connect", -1), self._connect
            case "waiting":
                yield ("take", -1), self.take
            case "verifying":
                yield ("consume", -1), self._consume
                for worker in self._workers_of_batch() if self.refusals_left else ():
                    yield ("refuse", worker), lambda worker=worker: self._refuse(worker)
            case "training":
                yield ("train", -1), self._end_step
            case "publishing" if self._may_stage():
                yield ("publish", -1), self._publish
        is_between_steps = (
            self.trainer in ("waiting", "verifying", "finishing")
            and self.controller.announcements.deferred is None
        )
        if is_between_steps and self.cuts_left:
            yield ("cut", -1), self._cut
        if self.saved is not None and self.crashes_left:
            yield ("crash", -1), self._crash
        yield from self.events_of_leaving()

    def _may_stage(self):
        """As Controller.stage waits; from here to the publish is the time in which weights are written."""
        if not self.transport.keeps_announced and self.controller.evaluation is not None:
            return False
        return self.transport.reserve()

    def events_of_leaving(self):
        for worker in self.controller.workers:
            if (
                worker.is_up
                and worker.process.exit_code is None
                and (self.deaths_left or is_remote(worker))
            ):
                yield ("die", worker.index), lambda worker=worker: self._kill(worker)
                if is_remote(worker):
                    yield ("die", -worker.index), lambda worker=worker: self._shut_out(worker)
                    if worker.running:
                        yield ("lapse", worker.index), lambda worker=worker: self._end_lease(worker)
        if self.trainer != "connecting" and (
            self.joins_left or (self.config.listen and not [*self.controller.workers])
        ):
            yield ("join", -1), self._join

    def _cut(self):
        """Workers act, and die, while it waits for what they say."""
        self.cuts_left, self.said_lost = max(0, self.cuts_left - 1), {}
        state = self.controller.cut(lambda: {"events": self.oracle.num_events})
        said = [self.said_lost.get(ticket.ticket_id, 0) for ticket in state.queue]
        where = self.version, self.version == self.steps
        self.saved = Saved(
            plain.encode(state), copy.deepcopy(self.oracle), sum(said), *where, [*self.evaluations]
        )

    def _crash(self):
        """Everything is thrown away, and the run goes on from the checkpoint."""
        self.crashes_left = max(0, self.crashes_left - 1)
        self.controller.stop()
        saved, state = self.saved, plain.decode(ControllerState, self.saved.state)
        oracle = copy.deepcopy(saved.oracle)
        assert state.records == {"events": oracle.num_events}
        oracle.resume(state, saved.num_lost)
        self._begin(oracle, state)
        self.version, self.evaluations = saved.version, [*saved.evaluations]
        if saved.is_last:  # else there is nothing left to do
            self.steps, oracle.is_longer = saved.version + 2, True
        oracle.check()
        oracle.check_ledger(self.controller.buffer.balance())

    def _join(self):
        self.joins_left = max(0, self.joins_left - 1)
        process = WalkProcess(self.config, None, self)
        worker = self.controller.let_in(process, "elsewhere", scores_probe=True)
        process.index = worker.index
        process.start()

    def _shut_out(self, worker):
        worker.process.exit_code, self.oracle.disbelieved = 0, worker.index
        worker.process.outbox.clear()
        self.controller.on_message(worker, Disbelieved())
        self.oracle.shut_out(worker.index)

    def _end_lease(self, worker):
        worker.given_at[self.rng.choice(list(worker.running))] = -math.inf
        self.controller.end_leases()

    def _note_leases(self, end_leases):
        self.is_ending_leases = True
        tickets = end_leases()
        self.is_ending_leases = False
        return tickets

    def _deliver(self, worker):
        message = worker.process.outbox.popleft()
        if isinstance(message, Finished):
            worker.process.num_given -= len(message.trajectories)
            for trajectory in message.trajectories:
                if trajectory.ticket_id in worker.process.lapsed:
                    self.oracle.late(trajectory)
            in_time = [t for t in message.trajectories if t.ticket_id not in worker.process.lapsed]
            self.delivering = {(t.ticket_id, t.member): t for t in in_time}
        elif isinstance(message, Updated):
            self.oracle.discard(message.sampled.discarded)
        elif isinstance(message, InFlight):
            self.said_lost |= message.lost
        self.controller.on_message(worker, message)
        if self.config.scheduling != "batch":
            for other in self.controller.workers:
                assert other.process.num_given <= self.config.max_running_requests

    def _record(self, event, **fields):
        """The controller says when it takes in each trajectory; a message may hold several, and a version be announced
        between them."""
        if event == "trajectory":
            self.oracle.deliver(self.delivering.pop((fields["ticket"], fields["member"])))

    def _kill(self, worker):
        self.deaths_left -= not is_remote(worker)
        worker.process.die()

    def _connect(self):
        self.controller.connect(self.transport)
        self._end_step()
        if self.state is not None:
            self.evaluate = self.state.evaluates

    def take(self):
        """The trainer asks for a batch; whether it got one. That none can come must never be said: it is wrong or a
        deadlock."""
        holds = self.config.listen is not None
        batch = (
            self.controller.hold_batch_if_ready()
            if holds
            else self.controller.take_batch_if_ready()
        )
        if not batch:
            assert self.controller._can_get_batch(), (
                f"no batch can come: {self.controller.dispatcher.describe()}"
            )
            return False
        self.oracle.hold(batch)
        self.trainer = "verifying"
        if not holds:
            self._train_on(batch)
        self.oracle.check_ledger(self.controller.buffer.balance())
        self._take_evaluations()
        return True

    def _take_evaluations(self):
        self.evaluations += self.controller.ended_evaluations
        self.controller.take_evaluation()

    def _workers_of_batch(self):
        """Workers of machines that joined: those that are there, and those of which there is something in the batch."""
        workers = {
            t.worker for group in self.controller.buffer.held_groups for t in group.trajectories
        }
        workers |= {worker.index for worker in self.controller.workers}
        return [worker for worker in workers if worker >= self.num_workers]

    def _refuse(self, worker):
        """What a worker has sent is found to be false, which may have left meanwhile."""
        self.refusals_left -= 1
        is_refused = self.oracle.refuse(worker)
        assert self.controller.refuse_batch([worker]) is is_refused
        self.oracle.shut_out(worker)
        self.trainer = "waiting" if is_refused else "verifying"
        self.oracle.check_ledger(self.controller.buffer.balance())

    def _consume(self):
        self._train_on(self.controller.consume_batch())

    def _train_on(self, batch):
        self.oracle.consume(batch)
        self.version, self.trainer = self.version + 1, "training"
        self.oracle.check_ledger(self.controller.buffer.balance())

    def _end_step(self):
        every, is_last = self.config.eval_every, self.version == self.steps
        self.evaluate = every > 0 and (is_last or self.version % every == 0)
        self.evaluate |= self.controller.withdraw()
        self.trainer = "publishing"

    def _publish(self):
        is_last = self.version == self.steps
        oldest = 0 if self.state is None else self.state.announced
        version = self.version if is_last else max(oldest, self.version - self.config.publish_delay)
        buffer = self.transport.take_buffer()
        self.buffers[buffer] = version
        info = {
            "buffer": buffer,
            "version": version,
            "trainer_version": self.version,
            "evaluate": self.evaluate,
        }
        if self.config.listen:
            self.controller.pulled.stage(version, [])
        self.controller.publish(
            Announcement(version, self.version, Staged(buffer, [info]), (), self.evaluate)
        )
        self.trainer = "finishing" if is_last else "waiting"

    def _check_end(self):
        self._take_evaluations()
        assert self.oracle.trainer_version == self.steps
        put_back = self.controller.tickets.state.put_back
        self.oracle.check_end(self.controller.buffer.balance(), self.evaluations, put_back)


def walk_of(seed):
    """The walk that a seed stands for."""
    rng = random.Random(seed)
    config = draw_config(rng)
    return Walk(config, rng.randint(0 if config.listen else 1, 3), rng.randint(0, 3), rng)


@pytest.mark.parametrize(
    "chunk", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, NUM_CHUNKS))]
)
def test_in_any_order_of_events_and_with_any_options_the_promises_hold(chunk):
    for seed in range(chunk, NUM_WALKS, NUM_CHUNKS):
        walk = walk_of(seed)
        with ExitStack() as on_failure:
            on_failure.callback(walk.controller.stop)
            on_failure.callback(print, f"the walk of seed {seed}, with", walk.config)
            walk.run()
            on_failure.pop_all()
            walk.controller.stop()


def test_a_worker_that_still_loads_a_version_when_it_is_announced_again_is_woken():
    options = {"async_ratio": 0.0, "over_sampling": 2.0, "publish_delay": 1}
    config = Config(
        groups_per_step=1, group_size=1, advantage="reinforce", eval_every=0, **options
    ).checked()
    walk = Walk(config, 2, 0, random.Random(0))
    walk.failure_share, walk.deaths_left = 0.0, 0
    with ExitStack() as stack:
        stack.callback(walk.controller.stop)
        while walk.version < 1 or walk.trainer != "waiting":
            events = [*walk.events_of_workers(), *walk._events_of_trainer()]
            walk._choose([event for event in events if event[0] != ("load", 1)])()
        slow = walk.controller.workers[1]
        slow.process.load()
        assert slow.is_paused, "it was told to, behind the weights that it has only now"
        walk._deliver(slow)
        while slow.process.inbox or slow.process.loading:
            slow.process.load() if slow.process.loading else slow.process.read()
        assert not slow.process.stands and slow.process.version == 0
