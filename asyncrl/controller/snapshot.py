"""The snapshot: a node's rollout at one instant, in plain data, for a resume.

Each problem that was handed out is resident, put back, or done: consumed, or dropped for good. `next_problem` of
TicketState counts problems that were handed out. So problems that are resident or put back are saved, too.
"""

from dataclasses import dataclass, field

from asyncrl.config import Config
from asyncrl.controller.buffer import BufferState
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.failures import Failures
from asyncrl.controller.tickets import TicketState
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
    """True if LeadingPublisher evaluates the published version again, because its evaluation had not ended."""
    evaluations: list[Evaluation]
    """Evaluations that ended and are not reported yet."""
    num_restarts: int
    failures: Failures = field(default_factory=Failures)


def continues_responses(config: Config) -> bool:
    """Return whether responses continue from their tokens after a resume.

    On-policy training samples them again from their seeds. A resumed run then equals the unbroken run to the bit.
    """
    return config.async_ratio > 0 or config.suspends_between_steps
