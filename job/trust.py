"""What an honest machine cannot have sent."""

from config import Config
from data.records import Ticket, Trajectory


def mistake_in(trajectory: Trajectory, ticket: Ticket, config: Config, newest_version: int) -> str | None:
    """What is wrong with a trajectory of a ticket, if anything is."""
    return None
