"""The snapshot: a node's rollout at one instant, in plain data, for a resume.

Each problem that was handed out is resident, put back, or done: consumed, or dropped for good. `next_problem` of
TicketState counts problems that were handed out. So problems that are resident or put back are saved, too.
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
    """The rollout of one node between two steps.

    The newest version can be unannounced: publish_delay holds it back, or rollout ended before. A resume publishes
    before it admits groups, so every consumed batch counts as announced.
    """

    buffer: BufferState
    tickets: TicketState
    queue: list[Ticket]
    """Tickets of training groups that lack their trajectories, in the order of their reissue."""
    published_version: int
    """Version of the weights that were announced last. LeadingPublisher evaluates only a newer version."""
    evaluates: bool
    """Whether LeadingPublisher evaluates the published version again, because its evaluation had not ended."""
    evaluations: list[Evaluation]
    """Evaluations that ended and are not reported yet."""
    num_restarts: int
    failures: Failures = field(default_factory=Failures)


def continues_responses(config: Config) -> bool:
    """Return whether responses continue from their tokens after a resume.

    On-policy training samples them again from their seeds. A resumed run then equals the unbroken run to the bit.
    """
    return config.async_ratio > 0 or config.suspends_between_steps


def unfinished_tickets(
    workers: Iterable[Worker],
    queue: Iterable[Ticket],
    buffer: SampleBuffer,
    ticket_source: TicketSource,
) -> list[Ticket]:
    """Return the tickets of running groups, oldest first.

    A ticket continues from the tokens that its worker has reported.
    """
    partials, assigned = {}, []
    for worker in workers:
        assigned += worker.awaited
        if worker.in_flight is not None:
            partials |= worker.in_flight.partials
    assigned.sort(key=lambda ticket: ticket.ticket_id)
    unfinished = []
    for ticket in (*assigned, *queue):
        # This leaves out evaluation tickets, too, because their groups are not resident. `evaluates` restarts them.
        if buffer.is_unfinished(ticket.group_id):
            partial = partials.get(ticket.ticket_id)
            unfinished.append(ticket_source.continued(ticket, partial) if partial else ticket)
    return unfinished
