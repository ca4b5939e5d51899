"""Rewards of single-turn tasks: what a response is worth, by the task's own score."""

from collections.abc import Callable

from data.tasks import score_of

ScoreFunction = Callable[[str, str, str], float]
"""`score(task, answer, response)`."""


def score(task: str, answer: str, response: str) -> float:
    """Reward of a response, where `answer` is what the task's Problem says."""
    return score_of(task)(answer, response)
