"""What is trained on when workers die and hosts leave: by their seeds, the same responses as if none had."""

import random
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from fake_job import response_to

from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.tickets import PromptSource, TicketSource
from asyncrl.controller.workers import Worker, Workers
from asyncrl.messages import Finished, Ready, SampledTokens, Tickets, Update, Updated
from asyncrl.weights.transport import Announcement, Buffers, Staged
from data.problem import Problem
from extras.swarm.controller import SwarmController
from extras.swarm.pull import PullTransport
from extras.swarm.remote import SwarmWorkers
from extras.swarm.wire import Fetch, Fetched

NUM_GROUPS = 150
"""Groups whose lengths are compared: the first that were issued."""
NUM_WORKERS = 3


class SeededProcess:
    """An engine that samples a token a tick for each of its tickets; how many follows from the ticket's seed."""

    def __init__(self):
        self.reading, self.started_at, self.exit_code = Future(), time.monotonic(), -9
        self.inbox, self.running, self.version = [], {}, -1

    def send(self, message):
        self.inbox.append(message)

    def stop(self, timeout_s=0): ...

    def death_report(self):
        return "a worker was killed; it"

    def tick(self, index):
        """Act on what has come, sample a token of each response, and return what is said of that."""
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            match message:
                case Fetch(version):
                    yield Fetched(version)
                case Update(version):
                    self.version = version
                    yield Updated(version, 0.0, SampledTokens(), None)
                case Tickets(tickets):
                    for ticket in tickets:
                        response = replace(response_to(ticket, self.version), worker=index)
                        self.running[ticket.ticket_id] = [response, response.num_generated]
        for ticket_id, progress in list(self.running.items()):
            progress[1] -= 1
            if progress[1] <= 0:
                del self.running[ticket_id]
                yield Finished([progress[0]], None)


class WithoutProcesses:
    """For a kind of Workers: its processes are not started."""

    def _start(self, index, num_restarts=0):
        return Worker(index, SeededProcess(), num_restarts=num_restarts)


class SeededWorkers(WithoutProcesses, Workers):
    """The real Workers, with processes that are not started."""


class SeededSwarmWorkers(WithoutProcesses, SwarmWorkers):
    """The same in a run that listens."""


class Transport(Buffers):
    """Buffers without weights."""

    def init_info(self, worker):
        return {}


class Run:
    """A real controller and its workers, which die at random, or hosts, which leave at random."""

    def __init__(self, are_remote, death_share, seed):
        self.rng, self.are_remote, self.death_share = random.Random(seed), are_remote, death_share
        listen = {"listen": "here:1", "num_rollout_workers": 0} if are_remote else {}
        sizes = {
            "groups_per_step": 4,
            "group_size": 4,
            "max_running_requests": 6,
            "async_ratio": 1.0,
            "eval_every": 0,
        }
        config = Config(**sizes, **listen).checked()
        num_own = 0 if are_remote else NUM_WORKERS
        placed = tuple(WorkerPlacement(index, None, None, 1, 0.0) for index in range(num_own))
        kinds = (SeededSwarmWorkers, SwarmController) if are_remote else (SeededWorkers, Controller)
        workers = kinds[0](config, Placement((None,), 1, placed, "shm"), "", Path(), main=None)
        prompts = PromptSource(lambda index: Problem("", ""), [], lambda problem: [2, 3])
        tickets = TicketSource(config, prompts)
        self.controller = kinds[1](config, workers, tickets, lambda event, **fields: None)
        self._transport, self.version, self.num_lost, self.num_deaths = Transport(2), -1, 0, 0

    def lengths(self):
        """Lengths of the trained responses of the first NUM_GROUPS groups, ascending."""
        self._start()
        lengths = {}
        while not all(group_id in lengths for group_id in range(NUM_GROUPS)):
            for worker in list(self.controller.workers):
                if self._is_to_die(worker):
                    self._kill(worker)
                    continue
                for message in worker.process.tick(worker.index):
                    self.controller.on_message(worker, message)
            for group in self.controller.take_batch_if_ready() or []:
                lengths[group.group_id] = [
                    trajectory.num_generated for trajectory in group.trajectories
                ]
            if self.controller.buffer.trainer_version > self.version and self._transport.reserve():
                self._publish()
        self.controller.buffer.balance()  # raises if the ledger does not balance
        self.controller.stop()
        return sorted(length for group_id in range(NUM_GROUPS) for length in lengths[group_id])

    def _start(self):
        self.controller.launch()
        if self.are_remote:
            self.controller.pulled = PullTransport([])
        for worker in list(self.controller.workers):
            self.controller.on_message(worker, Ready(0.0))
        self.controller.connect(self._transport)
        for _ in range(NUM_WORKERS * self.are_remote):
            self._join()
        assert self._transport.reserve()
        self._publish()

    def _join(self):
        worker = self.controller.let_in(SeededProcess(), "host", scores_probe=False)
        self.controller.on_message(worker, Ready(0.0))

    def _is_to_die(self, worker):
        """A response that is lost twice with workers of the run's own has another seed from then on, so none is; and a
        worker that dies too often ends the run."""
        if not self.are_remote and (
            worker.num_restarts or any(ticket.attempt for ticket in worker.running.values())
        ):
            return False
        return self.rng.random() < self.death_share

    def _kill(self, worker):
        self.num_deaths += 1
        self.num_lost += len(worker.running)
        self.controller.on_message(worker, None)
        if self.are_remote:
            self._join()
        else:
            self.controller.on_message(self.controller.workers[worker.index], Ready(0.0))

    def _publish(self):
        self.version += 1
        staged = Staged(self._transport.take_buffer(), [{}])
        if self.are_remote:
            self.controller.pulled.stage(self.version, [])
        self.controller.publish(Announcement(self.version, self.version, staged, (), False))


@pytest.mark.parametrize("are_remote", [False, True], ids=["own workers die", "hosts leave"])
def test_deaths_do_not_change_the_lengths_of_what_is_trained_on(are_remote):
    expected = Run(are_remote, death_share=0.0, seed=0).lengths()
    for seed in range(3):
        run = Run(are_remote, death_share=0.1, seed=seed)
        assert run.lengths() == expected
        assert run.num_deaths > 20 and run.num_lost > 100
