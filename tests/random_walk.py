"""A random walk over the real controller: every message, token, death and load is an event, in any order that a real
system allows, on any options that Config accepts; an oracle that shares no state with it checks what comes out.

Each walk has the seed by which it can be made again. The walk of an optional system draws from more options, and adds
its events (extras/test_baselines.py, extras/swarm/tests/test_swarm_walk.py).

WALKS in the environment sets how many walks there are; an optional system has half as many. A tenth of them are not
slow. The rarest of the faults that were once planted showed in 5 walks of 1,000.
"""

import os
import pickle
import random
import tomllib
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from walk_oracle import Oracle, watch_tickets
from walk_worker import WalkWorkers

from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.snapshot import ControllerState
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import MAX_RESTARTS
from asyncrl.messages import Finished, WeightsLoaded
from asyncrl.plugins import last_given
from asyncrl.runlog import plain
from asyncrl.weights.transport import Announcement, BufferedTransport
from data.problem import Problem

CHOICES = tomllib.loads(Path(__file__).with_name("walk_options.toml").read_text())
MAX_EVENTS = 100_000
NUM_WALKS = int(os.environ.get("WALKS", 1250))
NUM_CHUNKS = 10
IN_CHUNKS = pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, NUM_CHUNKS))]
)
"""Makes a test of each chunk of the walks. The first alone is not slow."""
RARE = {"die": 0.01, "cut": 0.05, "crash": 0.02}


def draw_config(rng, choices):
    """The first options drawn that a run may have."""
    while True:
        options = {name: rng.choice(values) for name, values in choices.items()}
        if options["over_sampling"] > 1:
            options["async_ratio"] = 0.0
        if options["group_size"] == 1:  # of one response alone none would be left
            options |= {"advantage": "reinforce", "drop_zero_variance": False}
        with suppress(ValueError):
            return Config(**options).checked()


class WalkTransport(BufferedTransport):
    """Buffers of which only the version is kept; one that sends does so only to who waits for it."""

    def __init__(self, walk, num_buffers, sends):
        super().__init__([], num_buffers)
        self.walk, self.sends = walk, sends
        self.versions = [None] * num_buffers
        """What each buffer holds; nothing from the moment in which it is written until it is announced."""
        self.connected = set()

    def init_info(self, worker=0):
        assert worker not in self.connected, "what joined the trainer to a dead worker is kept"
        self.connected.add(worker)
        return {}

    def disconnect(self, worker):
        self.connected.discard(worker)

    def write(self, buffer, version, parameters):
        self.versions[buffer] = None
        return [{"buffer": buffer, "version": version}]

    def make_readable(self, staged):
        super().make_readable(staged)
        (info,) = staged.messages
        self.versions[staged.buffer] = info["version"]
        self.walk.oracle.announce(info["version"], info["trainer_version"], info["evaluate"])

    def send(self, worker, staged):
        process = self.walk.controller.workers[worker].process
        assert self.sends and staged.messages == process.loading.update_infos
        process.is_receiving = False


class Walk:
    """One run, an event at a time; all of it may be thrown away and gone on with from a checkpoint."""

    choices = CHOICES
    """What the options are drawn from."""
    workers_class = WalkWorkers
    fewest_workers = 1
    """Of this node; with none only hosts sample."""
    can_snapshot = ("waiting", "finishing")
    """What the trainer does when a snapshot may be taken."""

    def __init__(self, config, num_workers, num_eval_problems, rng):
        self.config, self.rng = config, rng
        self.num_workers, self.num_eval_problems = num_workers, num_eval_problems
        self.steps = config.steps
        self.failure_share = rng.choice([0.0, 0.0, 0.1])
        self.weights = {}
        self.deaths_left = rng.randint(0, 8)
        self.cuts_left, self.crashes_left = rng.choice([0, 3, 12]), rng.choice([1, 4])
        self.saved = None
        """State and oracle of the newest checkpoint."""
        self.is_to_be_longer = rng.random() < 0.2
        self.num_buffers = rng.choice([1, 2])
        self._prepare()
        self._begin(Oracle(config, num_eval_problems), None)

    @classmethod
    def of(cls, seed):
        """The walk that a seed stands for."""
        rng = random.Random(seed)
        config = draw_config(rng, cls.choices)
        return cls(config, rng.randint(cls.fewest_workers, 3), rng.randint(0, 3), rng)

    def _prepare(self):
        """Draw what is drawn once for a walk."""

    def _begin(self, oracle, state):
        """Start the processes of a run, a new one if there is no state."""
        config, self.oracle, self.state = replace(self.config, steps=self.steps), oracle, state
        oracle.num_steps = self.steps
        self.transport = WalkTransport(self, self.num_buffers, sends=self.num_buffers == 1)
        self.delivering = {}
        self.num_deaths = Counter()
        """Deaths of each worker since a response came back from it."""
        prompts = PromptSource(
            train_problem=lambda index: Problem(
                "", str(index), index if config.is_multi_turn else None
            ),
            eval_problems=[Problem("", str(-1 - index)) for index in range(self.num_eval_problems)],
            encode=lambda problem: [2, 3],
        )
        plugins = config.plugins
        tickets_class = last_given((plugin.tickets for plugin in plugins), TicketSource)
        tickets = watch_tickets(tickets_class(config, prompts), oracle)
        placed = tuple(
            WorkerPlacement(index, None, None, 1, 0.0) for index in range(self.num_workers)
        )
        workers = self.workers_class(self, config, Placement((None,), 1, placed, "shm"))
        controller_class = last_given((plugin.controller for plugin in plugins), Controller)
        self.controller = controller_class(config, workers, tickets, self._record, state=state)
        self.controller.lock.wait = self._act_while_waiting
        self.controller.launch()
        self.trainer, self.is_in_vain = "connecting", False
        """What the trainer does, and whether it has just asked for a batch that is not there."""

    def _act_while_waiting(self, timeout):
        """What waits for the controller's state to change: workers act and leave meanwhile."""
        self._act([*self._events_of_workers(), *self._events_of_leaving()])
        return True

    @property
    def version(self):
        return self.oracle.num_consumed_batches

    # Events

    def run(self):
        """Until all steps are made and the last evaluation has ended."""
        for _ in range(MAX_EVENTS):
            if self._is_alone() and self.rng.random() < 0.1:
                self.controller.finish_evaluations()
                assert self.controller.has_evaluated()
            if self.trainer == "finishing" and self.controller.evaluation is None:
                self._check_end()
                if not self.is_to_be_longer:
                    return
                self.is_to_be_longer = False
                self._cut()
                self._crash()
            events = [*self._events_of_workers()]
            if self.trainer == "waiting" and not events and [*self.controller.workers]:
                assert self.take(), "nothing can happen any more"
                self._check()
            else:
                self._act([*events, *self._events_of_trainer()])
        raise AssertionError(f"no end after {MAX_EVENTS} events")

    def _is_alone(self):
        """Whether the trainer has nothing to do but to wait for the last evaluation."""
        return self.trainer == "finishing"

    def _act(self, events):
        """Let one of them happen. Those of the same kind and worker are as fast as each other; of the others some are
        far slower in a walk."""
        assert events, "nothing can happen any more"
        for kind, _ in events:
            if kind not in self.weights:
                self.weights[kind] = self.rng.choice([0.03, 0.3, 1.0, 1.0])
        weights = [RARE.get(kind[0], self.weights[kind]) for kind, _ in events]
        (event,) = self.rng.choices([event for _, event in events], weights)
        self.is_in_vain = event() is False
        self._check()

    def _check(self):
        """After every event. Who still has a ticket of a group that has ended was told to abort it; any other ticket
        that it was told to abort is issued again."""
        self.oracle.check()
        for worker in self.controller.workers:
            process = worker.process
            assert process.given or process.is_told or not worker.is_up
            for ticket_id, ticket in process.given.items():
                has_ended, is_aborted = (
                    ticket.group_id in self.oracle.closed,
                    ticket_id in process.aborted,
                )
                assert is_aborted or not has_ended
                if is_aborted and not has_ended:
                    process.lapsed.add(ticket_id)
            num_given = sum(ticket.num_members for ticket in process.given.values())
            is_batch = self.config.scheduling == "batch"
            assert num_given <= self.config.max_running_requests or is_batch
        own = [
            worker.process for worker in self.controller.workers if worker.index < self.num_workers
        ]
        assert self.controller.is_idle() == all(
            process.is_told or process.is_suspended for process in own
        )

    def _events_of_workers(self):
        for worker in list(self.controller.workers):
            process = worker.process
            for kind, event in process.events():
                yield (kind, worker.index), event
            if process.outbox:
                yield ("deliver", worker.index), lambda worker=worker: self._deliver(worker)

    def _events_of_trainer(self):
        match self.trainer:
            case "connecting":
                yield ("connect", -1), self._connect
            case "waiting" if not self.is_in_vain:
                yield ("take", -1), self.take
            case "holding":
                yield ("consume", -1), lambda: self._train_on(self.controller.consume_batch())
            case "training":
                yield ("train", -1), self._end_step
            case "publishing":
                yield ("stage", -1), self._stage
            case "staging":
                yield ("publish", -1), self._publish
        if self.trainer in self.can_snapshot and self.cuts_left:
            yield ("cut", -1), self._cut
        if self.saved is not None and self.crashes_left:
            yield ("crash", -1), self._crash
        yield from self._events_of_leaving()

    def _events_of_leaving(self):
        for worker in self.controller.workers:
            if worker.is_up and worker.process.exit_code is None and self._may_die(worker):
                yield ("die", worker.index), lambda worker=worker: self._kill(worker)

    def _may_die(self, worker):
        return self.deaths_left and self.num_deaths[worker.index] < MAX_RESTARTS

    def _cut(self):
        self.cuts_left = max(0, self.cuts_left - 1)
        self.oracle.is_last = self.version == self.steps
        state, record_bytes = self.controller.snapshot(lambda: {"events": self.oracle.num_events})
        assert record_bytes == {"events": self.oracle.num_events}
        deferred = self.controller.announcements.deferred
        # without a worker no evaluation ends, and what waits for one is published again
        self.oracle.asked_again = [state.published_version] * state.evaluates
        if deferred is not None and deferred.evaluate and not [*self.controller.workers]:
            self.oracle.asked_again.append(deferred.version)
        assert not any(worker.process.owes_progress for worker in self.controller.workers)
        self.saved = plain.encode(state), pickle.dumps(self.oracle)

    def _crash(self):
        """Everything is thrown away, and the run goes on from the checkpoint."""
        self.crashes_left = max(0, self.crashes_left - 1)
        self.controller.stop()
        state, oracle = plain.decode(ControllerState, self.saved[0]), pickle.loads(self.saved[1])
        oracle.resume(state)
        if oracle.is_last:  # else there is nothing left to do
            self.steps, oracle.is_longer = oracle.num_consumed_batches + 2, True
        self._begin(oracle, state)
        oracle.check()
        oracle.check_ledger(self.controller.buffer.balance())

    def _deliver(self, worker):
        self._on_message(worker, worker.process.outbox.popleft())

    def _on_message(self, worker, message):
        if isinstance(message, Finished):
            self.delivering, self.num_deaths[worker.index] = {}, 0
            for trajectory in message.trajectories:
                worker.process.given.pop(trajectory.ticket_id, None)
                if trajectory.ticket_id in worker.process.lapsed:
                    self.oracle.late(trajectory)
                else:
                    self.delivering[trajectory.ticket_id, trajectory.member] = trajectory
        elif message is None:
            self.num_deaths[worker.index] += 1
        elif isinstance(message, WeightsLoaded):
            self.oracle.discard(message.sampled.discarded)
        self.controller.on_message(worker, message)

    def _record(self, event, **fields):
        """The controller says when it takes in each trajectory; a message may hold several, and a version be announced
        between them."""
        if event == "trajectory":
            self.oracle.deliver(self.delivering.pop((fields["ticket"], fields["member"])))

    def _kill(self, worker):
        self.deaths_left -= 1
        worker.process.die()

    def _connect(self):
        self.controller.connect(self.transport)
        self._end_step()
        if self.state is not None:
            self.evaluate = self.oracle.is_evaluation_due = self.state.evaluates

    def take(self):
        """The trainer asks for a batch; whether it got one. One must be able to come."""
        self.oracle.expect_batch()
        batch = [self.controller.buffer.group(i) for i in self.controller.hold_batch()]
        if not batch:
            assert self.controller.ended_by is None and self._can_get_batch(), (
                f"no batch can come: {self.controller.dispatcher.describe()}"
            )
            self.oracle.check_batch([])
            return False
        self.oracle.hold(batch)
        self.trainer = "holding"
        self.oracle.check_ledger(self.controller.buffer.balance())
        self._take_evaluations()
        return True

    def _can_get_batch(self):
        """Whether weights wait to be announced, a worker starts, or a training ticket runs or can start on a worker
        that is not paused. Else there is a deadlock."""
        announcements, workers = self.controller.announcements, self.controller.workers
        is_announced = announcements.newest is not None and announcements.deferred is None
        may_admit = self.controller.buffer.num_free_places() > 0
        if not is_announced or workers.any_starting or may_admit:
            return True
        active = [worker for worker in workers if worker.loading or not worker.is_paused]
        running = [ticket for worker in active for ticket in worker.tickets.values()]
        tickets = [*self.controller.dispatcher.queue, *running]
        return bool(active) and any(not ticket.is_evaluation for ticket in tickets)

    def _take_evaluations(self):
        self.oracle.evaluations += self.controller.ended_evaluations
        self.controller.take_evaluation()

    def _train_on(self, batch):
        self.oracle.consume(batch)
        self.trainer = "training"
        self.oracle.check_ledger(self.controller.buffer.balance())
        if self.config.over_sampling > 1 and not self.oracle.evaluating:
            assert all(w.process.is_suspended for w in self.controller.workers if w.is_up)
        if self.config.colocate == "sleep":
            assert not self.oracle.evaluating, "an engine sleeps before its evaluation has ended"
            assert all(worker.process.is_asleep for worker in self.controller.workers)

    def _end_step(self):
        every, is_last = self.config.eval_every, self.version == self.steps
        self.evaluate = every > 0 and (is_last or self.version % every == 0)
        self.oracle.is_evaluation_due |= self.evaluate
        if self.controller.take_back_deferred():
            self.evaluate = True
            self.oracle.asked.pop()
        self.trainer = "publishing"

    def _stage(self):
        """From here to the publish weights are written over what the buffer held."""
        is_last = self.version == self.steps
        oldest = 0 if self.state is None else self.state.published_version
        version = self.version if is_last else max(oldest, self.version - self.config.publish_delay)
        self._stage_elsewhere(version)
        self.staged, self.trainer = self.controller.stage(version, []), "staging"

    def _stage_elsewhere(self, version):
        """Stage weights for workers that read no buffer of this node."""

    def _publish(self):
        info = self.staged.messages[0]
        info |= {"trainer_version": self.version, "evaluate": self.evaluate}
        self.oracle.asked += [info["version"]] * self.evaluate
        self.controller.announce_or_defer(
            Announcement(info["version"], self.version, self.staged, (), self.evaluate)
        )
        self.trainer = "finishing" if self.version == self.steps else "waiting"

    def _check_end(self):
        self._take_evaluations()
        assert self.version == self.steps
        self.oracle.check_failures(self.controller.failures())
        put_back = self.controller.ticket_source.state.put_back
        self.oracle.check_end(self.controller.buffer.balance(), put_back)


def run_walks(kind, num_walks, chunk):
    """Make one chunk of the walks of a kind, each to its end."""
    for seed in range(chunk, num_walks, NUM_CHUNKS):
        walk = kind.of(seed)
        print(f"the walk of seed {seed}, with {walk.config}")
        try:
            walk.run()
        finally:
            print(walk.controller.dispatcher.describe())
            walk.controller.stop()
