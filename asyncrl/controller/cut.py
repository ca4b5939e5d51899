"""The cut: everything that a resumed run needs of a node's rollout, in plain data, as of one instant.

Keyed by problem: each problem that was handed out is resident, put back, or done (consumed, or dropped for good). So
the frontier is what was consumed, and never what was handed out.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncrl.cluster.processes import RolloutEnded
from asyncrl.config import Config
from asyncrl.controller.buffer import BufferState
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.failures import Failures
from asyncrl.controller.tickets import TicketState
from asyncrl.records import Ticket

if TYPE_CHECKING:
    from asyncrl.controller.controller import Controller


@dataclass
class ControllerState:
    """The rollout of one node, between two steps, when all that was trained on is published."""

    buffer: BufferState
    tickets: TicketState
    queue: list[Ticket]
    """Tickets of training groups whose trajectories are still to come, in the order in which they are issued again."""
    announced: int
    """Version of the weights that were announced last. Tokens may be as new, so no older weights may follow."""
    evaluates: bool
    """Whether the published version is evaluated when it is announced again, as its evaluation had not ended."""
    evaluations: list[Evaluation]
    """Evaluations that have ended and were not reported."""
    num_restarts: int
    records: dict[str, int]
    """Length of each record at the cut, bytes."""
    failures: Failures = field(default_factory=Failures)


def continues_responses(config: Config) -> bool:
    """Whether responses continue from their tokens after a resume.

    Where training is on-policy they are sampled again by their own seeds instead, so that a resumed run equals the
    unbroken one to the bit.
    """
    return config.async_ratio > 0 or config.over_sampling > 1


def cut(controller: "Controller", measure: Callable[[], dict[str, int]]) -> ControllerState:
    """Return the state of a node's rollout, at an instant in which the caller holds the controller's lock.

    Weights that wait for an evaluation are announced first, unless it cannot end any more. Where responses
    continue from their tokens, the workers report how far these are. The instant is that of the last report.
    `measure()` gives the lengths of the records.
    """
    workers, announcements = controller.workers, controller.announcements
    with contextlib.suppress(RolloutEnded):  # the state can be saved, and the next batch raises it
        controller.wait_until(
            lambda: announcements.deferred is None or controller.ended_by or not any(workers),
            "an evaluation",
        )
    if continues_responses(controller.config):
        with contextlib.suppress(RolloutEnded):
            controller.wait_until(workers.request_progress_of_all(), "responses in flight")
    partials, lost, given = {}, {}, []
    for worker in workers:
        given += worker.awaited
        if worker.in_flight is not None:
            partials |= worker.in_flight.partials
            lost |= worker.in_flight.lost
    given.sort(key=lambda ticket: ticket.ticket_id)
    queue, num_lost = [], 0
    for ticket in (*given, *controller.dispatcher.queue):
        if controller.buffer.is_running(ticket.group_id):
            num_lost += lost.get(ticket.ticket_id, 0)
            partial = partials.get(ticket.ticket_id)
            queue.append(controller.tickets.continued(ticket, partial) if partial else ticket)
    buffer = controller.buffer.state()
    for count in ("tokens_generated", "tokens_dropped_aborted"):
        buffer.ledger[count] += num_lost
    return ControllerState(
        buffer,
        copy.deepcopy(controller.tickets.state),
        queue,
        announced=announcements.newest.version,
        evaluates=controller.evaluation is not None,
        evaluations=list(controller.ended_evaluations),
        num_restarts=workers.num_restarts,
        records=measure(),
        failures=copy.deepcopy(controller.dispatcher.failures),
    )


def restore(controller: "Controller", state: ControllerState) -> None:
    """Have a controller, in which nothing has happened, continue from a state.

    The tickets of what was running come before all others. An evaluation that was running starts again when its
    weights are announced.
    """
    controller.buffer.restore(state.buffer)
    controller.tickets.state = copy.deepcopy(state.tickets)
    controller.dispatcher.queue.extend(state.queue)
    controller.workers.num_restarts = state.num_restarts
    controller.dispatcher.failures = copy.deepcopy(state.failures)
    controller.ended_evaluations = list(state.evaluations)
