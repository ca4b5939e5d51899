"""Everything that a resumed run needs of rollout, in plain data, and how it is dealt out to another number of nodes.

Keyed by problem: of those that were handed out, each is resident, put back, or done, consumed or dropped for good. So
what counts as the frontier is what was consumed, and never what was handed out.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.controller.evaluation import Evaluation, Evaluations
from asyncrl.records import Group, Ticket, Trajectory

if TYPE_CHECKING:
    from asyncrl.controller.dispatcher import Dispatcher
    from asyncrl.controller.waiting import Changes

IDS_PER_NODE = 10**9
"""Groups and tickets of node n are numbered from n times this."""


@dataclass
class Resident:
    """A group that holds a place: running while members are missing, finished when all have arrived."""

    version: int
    """Oldest version that its tokens can have: that of its admission, then of its start; the true one once finished."""
    started: bool = False
    num_failed: int = 0
    members: dict[int, Trajectory] = field(default_factory=dict)
    group: Group | None = None
    rank: int = 0
    """Place in the order in which groups finished."""

    @property
    def num_generated(self) -> int:
        return sum(trajectory.num_generated for trajectory in self.members.values())

    def has_any_of(self, workers: Collection[int]) -> bool:
        """Whether one of these workers has sampled a member."""
        return any(trajectory.worker in workers for trajectory in self.members.values())


@dataclass
class BufferState:
    """A buffer in plain data."""

    trainer_version: int
    published_version: int
    residents: dict[int, Resident]
    """Those that have no place on this node any more admit nothing new until they are consumed."""
    ledger: dict[str, int | float]


@dataclass
class TicketState:
    """How far a source of tickets is: what it handed out is consumed, resident, put back or dropped for good."""

    next_problem: int
    next_group: int
    next_ticket: int
    problems: dict[int, int]
    """Resident group -> index of its problem."""
    put_back: list[int]
    """Problems to issue again, in this order."""


@dataclass
class ControllerState:
    """The rollout of one node, between two steps, when all that was trained on is published."""

    buffer: BufferState
    tickets: TicketState
    queue: list[Ticket]
    """Tickets of training groups whose trajectories are still to come, in the order in which they are issued again."""
    announced: int
    """Version of the weights that were announced last; tokens may be as new, so none that are older may follow."""
    evaluates: bool
    """Whether the published version is to be evaluated when it is announced again, as that was not at its end."""
    evaluations: list[Evaluation]
    """Those that have ended and were not reported."""
    num_restarts: int
    records: dict[str, int]
    """What `measure()` gave: how long the records were."""


def goes_on(config: Config) -> bool:
    """Whether responses go on from their tokens after a resume. Where training is on-policy they are sampled again by
    their own seeds instead, so that a resumed run is the unbroken one to the bit."""
    return config.async_ratio > 0 or config.over_sampling > 1


def cut(
    changes: "Changes",
    dispatcher: "Dispatcher",
    evaluations: Evaluations,
    measure: Callable[[], dict[str, int]],
) -> ControllerState:
    """The state of a node's rollout, at an instant in which the caller holds the lock.

    Weights that wait for an evaluation are announced before, unless no worker is there to end it. Where responses go
    on from their tokens, the workers say how far they are, and the last one's word is that instant: what ended until
    then has ended.
    """
    changes.wait_until(lambda: changes.announcements.deferred is None or not any(dispatcher.workers), "an evaluation")
    if goes_on(dispatcher.config):
        changes.wait_until(dispatcher.workers.ask(), "what is in flight")
    said = [worker.in_flight for worker in dispatcher.workers if worker.in_flight is not None]
    partials = {partial.ticket_id: partial for in_flight in said for partial in in_flight.partials}
    lost = {ticket_id: tokens for in_flight in said for ticket_id, tokens in in_flight.lost.items()}
    tickets = dispatcher.unfinished()
    queue = [dispatcher.tickets.going_on(t, partials[t.ticket_id]) if t.ticket_id in partials else t for t in tickets]
    buffer = dispatcher.buffer.state()
    num_lost = sum(lost.get(ticket.ticket_id, 0) for ticket in tickets)
    for count in ("tokens_generated", "tokens_dropped_aborted"):
        buffer.ledger[count] += num_lost
    return ControllerState(
        buffer,
        dispatcher.tickets.state(),
        queue,
        announced=changes.announcements.newest.version,
        evaluates=evaluations.running is not None,
        evaluations=list(evaluations.ended),
        num_restarts=dispatcher.workers.num_restarts,
        records=measure(),
    )


def restore(state: ControllerState | None, dispatcher: "Dispatcher", evaluations: Evaluations) -> None:
    """Have a node's rollout, in which nothing has happened, go on from a state, if there is one: with the tickets of
    what was running before all others."""
    if state is None:
        return
    dispatcher.buffer.restore(state.buffer)
    dispatcher.tickets.restore(state.tickets)
    dispatcher.queue.put_first(state.queue)
    dispatcher.workers.num_restarts = state.num_restarts
    evaluations.ended = list(state.evaluations)  # one that was running is started anew with its weights


def redistribute(states: list[ControllerState], num_nodes: int) -> list[ControllerState]:
    """The states of a run's nodes, dealt out to `num_nodes`; of as many they are kept as they are. Pure.

    Resident groups go to each node in turn, oldest first, so that each has its share of every batch, and what could be
    consumed in time still can. Problems that one node had passed and another not come to are put back. Totals are
    counted on by the first node, so that each ledger balances and their sum is the run's.

    Raises RuntimeError if the states are not of one step.
    """
    if len({(state.buffer.trainer_version, state.buffer.published_version) for state in states}) != 1:
        versions = [(state.buffer.trainer_version, state.buffer.published_version) for state in states]
        raise RuntimeError(f"states of nodes at different (trainer, published) versions: {versions}")
    if len(states) == num_nodes:
        return states
    whole = _merge(states)
    residents = whole.buffer.residents
    order = sorted(residents, key=lambda group_id: (residents[group_id].version, group_id))
    return [_share(whole, order, node, num_nodes) for node in range(num_nodes)]


def _merge(states: list[ControllerState]) -> ControllerState:
    """The state of a run of one node, which has what all have."""
    frontier = max(state.tickets.next_problem for state in states)
    passed_over = [range(state.tickets.next_problem, frontier, len(states)) for state in states]
    next_ids = [
        max(getattr(state.tickets, name) - node * IDS_PER_NODE for node, state in enumerate(states))
        for name in ("next_group", "next_ticket")
    ]
    problems = {group_id: problem for state in states for group_id, problem in state.tickets.problems.items()}
    put_back = sorted(chain(*(state.tickets.put_back for state in states), *passed_over))
    buffers = [state.buffer for state in states]
    residents = {group_id: resident for buffer in buffers for group_id, resident in buffer.residents.items()}
    ledger = Counter()
    for buffer in buffers:
        ledger.update(buffer.ledger)  # and not `+`, which leaves out sums below 0
    return replace(
        states[0],
        buffer=replace(buffers[0], residents=residents, ledger=dict(ledger)),
        tickets=TicketState(frontier, *next_ids, problems, put_back),
        queue=[ticket for state in states for ticket in state.queue],
        evaluates=any(state.evaluates for state in states),
        evaluations=[evaluation for state in states for evaluation in state.evaluations],
        num_restarts=sum(state.num_restarts for state in states),
        records={},
    )


def _share(whole: ControllerState, order: list[int], node: int, num_nodes: int) -> ControllerState:
    """What one of several nodes has of the state of all: every num_nodes-th group, in this order, and problem."""
    is_first, buffer, tickets = node == 0, whole.buffer, whole.tickets
    residents = {group_id: buffer.residents[group_id] for group_id in order[node::num_nodes]}
    elsewhere = [buffer.residents[group_id] for group_id in order if group_id not in residents]
    sign, moved = (-1, elsewhere) if is_first else (1, list(residents.values()))
    ledger = Counter(buffer.ledger if is_first else {})
    ledger["groups_issued"] += sign * len(moved)
    ledger["tokens_generated"] += sign * sum(resident.num_generated for resident in moved)
    next_ids = (next_id + node * IDS_PER_NODE for next_id in (tickets.next_group, tickets.next_ticket))
    problems = {group_id: tickets.problems[group_id] for group_id in residents}
    next_problem = tickets.next_problem + (node - tickets.next_problem) % num_nodes
    return replace(
        whole,
        buffer=replace(buffer, residents=residents, ledger=dict(ledger)),
        tickets=TicketState(next_problem, *next_ids, problems, tickets.put_back[node::num_nodes]),
        queue=[ticket for ticket in whole.queue if ticket.group_id in residents],
        evaluates=whole.evaluates and is_first,
        evaluations=whole.evaluations if is_first else [],
        num_restarts=whole.num_restarts if is_first else 0,
    )
