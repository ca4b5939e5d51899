"""The snapshot: all that a resumed run needs of a node's rollout, in plain data, as of one instant.

Each problem that was handed out is resident, put back, or done (consumed, or dropped for good). So the frontier is what
was consumed, and never what was handed out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.config import Config
from asyncrl.controller.buffer import BufferState, SampleBuffer
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.failures import Failures
from asyncrl.controller.tickets import TicketSource, TicketState
from asyncrl.controller.workers import Worker
from asyncrl.records import Ticket


@dataclass
class ControllerState:
    """The rollout of one node between two steps, when every trained version is published."""

    buffer: BufferState
    tickets: TicketState
    queue: list[Ticket]
    """Tickets of training groups without their trajectories, in the order in which they are issued again."""
    published_version: int
    """Version of the weights that were announced last. Tokens may have it, so no older weights may follow."""
    evaluates: bool
    """Whether the published version is evaluated again, because its evaluation had not ended."""
    evaluations: list[Evaluation]
    """Evaluations that have ended and are not reported yet."""
    num_restarts: int
    records: dict[str, int]
    """Length of each record file at the snapshot, bytes."""
    failures: Failures = field(default_factory=Failures)


def continues_responses(config: Config) -> bool:
    """Return whether responses continue from their tokens after a resume.

    On-policy training samples them again by their seeds, so that a resumed run equals the unbroken one to the bit.
    """
    return config.async_ratio > 0 or config.over_sampling > 1


def unfinished_tickets(
    workers: Iterable[Worker],
    queue: Iterable[Ticket],
    buffer: SampleBuffer,
    tickets: TicketSource,
) -> tuple[list[Ticket], int]:
    """Return the tickets of running groups, oldest first, and the number of generated tokens that are lost.

    A ticket continues from the tokens that its worker has reported.
    """
    partials, lost, assigned = {}, {}, []
    for worker in workers:
        assigned += worker.awaited
        if worker.in_flight is not None:
            partials |= worker.in_flight.partials
            lost |= worker.in_flight.lost
    assigned.sort(key=lambda ticket: ticket.ticket_id)
    unfinished, num_lost = [], 0
    for ticket in (*assigned, *queue):
        if buffer.is_running(ticket.group_id):
            num_lost += lost.get(ticket.ticket_id, 0)
            partial = partials.get(ticket.ticket_id)
            unfinished.append(tickets.continued(ticket, partial) if partial else ticket)
    return unfinished, num_lost
