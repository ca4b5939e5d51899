"""The baselines of the papers: `--scheduling batch`, `--scheduling lockstep` and `--no-replicate-prompts`.

`batch` splits groups over the workers in advance, in rounds: all responses are waited for, then all are rewarded.
`lockstep` is queue scheduling, but all environments take a turn before any takes the next. Without replicated
prompts a group is one request of group_size responses on one worker.

A barrier holds trajectories back until every running trajectory, on all workers, has come to it.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from asyncrl.config import Rule
from asyncrl.controller.controller import Controller
from asyncrl.controller.dispatcher import Dispatcher
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import Worker
from asyncrl.engine.completion import Request
from asyncrl.engine.episode import Episode
from asyncrl.engine.proxy import LLMProxy
from asyncrl.messages import IdleReason
from asyncrl.plugins import Plugin
from asyncrl.records import Completion, Ticket
from rollout import RolloutWorker

RULES: list[Rule] = [
    (
        lambda c: c.is_agent and c.scheduling != "queue",
        "--scheduling {c.scheduling} makes environments wait for each other, and an agent waits for none; use "
        "--scheduling queue",
    ),
    (
        lambda c: c.scheduling == "batch" and c.extra_members > 0,
        "--extra-members {c.extra_members} gives up the slowest responses, and --scheduling batch waits for all; "
        "change one of the two",
    ),
    # One request of several responses can be neither resumed nor left early.
    (
        lambda c: not c.replicate_prompts and c.on_update in ("resume", "restart"),
        "--no-replicate-prompts makes one request of all responses of a group, and --on-update {c.on_update} "
        "takes them up one by one; change one of the two",
    ),
    (
        lambda c: not c.replicate_prompts and c.is_multi_turn,
        "--no-replicate-prompts makes one request of all responses of a group, and --task {c.task} has several "
        "turns; change one of the two",
    ),
    (
        lambda c: not c.replicate_prompts and c.extra_members > 0,
        "--no-replicate-prompts makes one request of all responses of a group, and --extra-members "
        "{c.extra_members} gives up some; change one of the two",
    ),
    (
        lambda c: not c.replicate_prompts and c.group_size > c.max_running_requests,
        "--no-replicate-prompts makes one request of all responses of a group: --max-running-requests "
        "{c.max_running_requests} must be at least --group-size {c.group_size}; change one of the two",
    ),
    (
        lambda c: c.suspends_between_steps and c.scheduling == "batch",
        "--over-sampling {c.over_sampling:g} suspends responses between synchronous steps, and --scheduling batch "
        "leaves none running; change one of the two",
    ),
    (
        lambda c: c.listen is not None and c.scheduling != "queue",
        "--listen {c.listen} lets remote hosts join, and --scheduling {c.scheduling} is a baseline for one host; "
        "change one of the two",
    ),
]

# Messages


@dataclass(frozen=True)
class Waiting:
    """From a worker: tickets that have come to the barrier since the last message."""

    ticket_ids: list[int]


@dataclass(frozen=True)
class Proceed:
    """To a worker: all tickets wait at the barrier, so they continue."""


# Controller


class BaselineTickets(TicketSource):
    """Tickets that ask for a whole group each, unless prompts are replicated."""

    def for_group(self, group_id: int, problem_index: int, min_version: int) -> list[Ticket]:
        """Make the tickets of a new group."""
        tickets = super().for_group(group_id, problem_index, min_version)
        if self.config.replicate_prompts:
            return tickets
        return [replace(tickets[0], num_members=self.config.group_size)]


class BaselineDispatcher(Dispatcher):
    """Admits groups in rounds under `batch`, and opens the barrier of `batch` and `lockstep`."""

    def __init__(self, *arguments):
        """Arguments as of Dispatcher."""
        super().__init__(*arguments)
        self._has_rounds = self.config.scheduling == "batch"
        self.at_barrier: set[int] = set()
        """Tickets that wait for all others."""

    def admit_groups(self) -> None:
        """Admit groups, unless a round is running."""
        if not self._round_is_running():
            super().admit_groups()

    def assign_tickets(self) -> Iterator[tuple[Worker, Ticket]]:
        """Assign the tickets that can start now, and yield each with its worker. `batch` splits them evenly over the
        workers, whatever slots are free: the engine keeps what it cannot run yet."""
        if not self._has_rounds:
            yield from super().assign_tickets()
            return
        workers = list(self.workers)
        waiting, self.queue = self.queue, deque()
        for ticket in waiting:
            index = ticket.member if ticket.is_evaluation else ticket.group_id
            worker = workers[index % len(workers)]
            if self.has_weights(worker, ticket):
                self.assign(worker, ticket)
                yield worker, ticket
            else:
                self.queue.append(ticket)

    def send_out(self) -> None:
        """Send tickets to workers, and let all continue if every running trajectory waits at the barrier."""
        super().send_out()
        still_to_come = self._has_rounds and self._queues_training()
        if self.at_barrier and not still_to_come and self._running_tickets() <= self.at_barrier:
            self.at_barrier.clear()
            for worker in self.workers:
                worker.process.send(Proceed())

    def idle_reason(self, reason_if_full: IdleReason) -> str:
        """Return why a worker has no ticket."""
        if reason_if_full != "weights" and self._round_is_running():
            return "round"
        return super().idle_reason(reason_if_full)

    def on_message(self, worker: Worker, message) -> None:
        """Note the tickets that have come to the barrier."""
        if not isinstance(message, Waiting):
            super().on_message(worker, message)
        self.at_barrier.update(message.ticket_ids)

    def _round_is_running(self) -> bool:
        return self._has_rounds and (self._queues_training() or bool(self._running_tickets()))

    def _queues_training(self) -> bool:
        """Return whether a ticket of a training group waits for a worker."""
        return any(not ticket.is_evaluation for ticket in self.queue)

    def _running_tickets(self) -> set[int]:
        """Ids of the tickets of training groups that workers have."""
        running = (ticket for worker in self.workers for ticket in worker.tickets.values())
        return {ticket.ticket_id for ticket in running if not ticket.is_evaluation}


class BaselineController(Controller):
    """A controller whose dispatcher has a barrier."""

    dispatcher_class = BaselineDispatcher


# Worker


class BaselineEpisode(Episode):
    """A trajectory that waits for all others before each turn (`lockstep`) or before each step (`batch`)."""

    wait_at_barrier: Callable
    """Awaited where the scheduling has its barrier."""

    async def act(self, max_tokens: int) -> Completion:
        """Let the policy take one turn. Evaluation does not wait at the barrier."""
        scheduling = "queue" if self.ticket.is_evaluation else self.config.scheduling
        if scheduling == "lockstep":
            await self.wait_at_barrier()
        completion = await super().act(max_tokens)
        if scheduling == "batch" and not self.is_aborted:
            await self.wait_at_barrier()
        return completion


class BaselineWorker(RolloutWorker):
    """A worker whose trajectories wait at the barrier, or share the request of their group."""

    def __init__(self, *arguments):
        """Arguments as of RolloutWorker."""
        super().__init__(*arguments)
        self._opened = asyncio.Event()
        self._waiting: list[int] = []

    async def act(self, message) -> None:
        """Act on a message. The trajectories that come to the barrier after it opened wait for the next time."""
        if isinstance(message, Proceed):
            self._opened.set()
            self._opened = asyncio.Event()
        else:
            await super().act(message)

    def make_episodes(self, ticket: Ticket) -> list[Episode]:
        """Make the trajectories of a ticket: one, or a whole group."""
        generates = [self.proxy.generate]
        if ticket.num_members > 1:
            generates = share_request(self.proxy, ticket)
        episodes = []
        for member, generate in enumerate(generates, ticket.member):
            environment = self.environments.make_environment(ticket, member)
            episode = BaselineEpisode(
                self.config, ticket, member, environment=environment, generate=generate
            )
            episode.wait_at_barrier = functools.partial(self._wait_at_barrier, ticket.ticket_id)
            episodes.append(episode)
        return episodes

    async def _wait_at_barrier(self, ticket_id: int) -> None:
        """Wait until all tickets, on all workers, have come as far."""
        self.proxy.activity.set_idle("barrier")
        self.proxy.activity.add(trajectories=-1)
        try:
            self._waiting.append(ticket_id)
            asyncio.get_running_loop().call_soon(self.flush)
            await self._opened.wait()
        finally:
            self.proxy.activity.add(trajectories=1)

    def flush(self) -> None:
        super().flush()
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.connection.send(Waiting(waiting))


def share_request(proxy: LLMProxy, ticket: Ticket) -> list[Callable]:
    """Return one `generate` per member; all of them wait for the same request."""

    @functools.cache
    def start() -> asyncio.Future:
        request_id = f"{ticket.ticket_id}.0"
        return asyncio.ensure_future(
            generate_group(proxy, request_id, ticket.prompt_tokens, ticket.seed, ticket.num_members)
        )

    async def generate(index: int, *_) -> Completion:
        return (await start())[index]

    return [functools.partial(generate, index) for index in range(ticket.num_members)]


async def generate_group(
    proxy: LLMProxy, request_id: str, prompt_tokens: tuple[int, ...], seed: int, num_responses: int
) -> list[Completion]:
    """Sample several responses by one request; all are returned when the last has ended."""
    request = proxy.requests[request_id] = Request()
    try:
        await proxy.until_sampling()
        max_tokens = proxy.config.max_response_tokens
        return await proxy.sample_part(
            request, request_id, list(prompt_tokens), seed, max_tokens, num_responses
        )
    finally:
        del proxy.requests[request_id]


class BaselinePlugin(Plugin):
    """The changes of --scheduling and --no-replicate-prompts."""

    rules = RULES
    controller = BaselineController
    tickets = BaselineTickets
    rollout_worker = BaselineWorker


PLUGIN = BaselinePlugin()
