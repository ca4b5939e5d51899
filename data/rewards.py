"""Rewards of single-turn tasks: what a response is worth.

Reward code meets whatever a policy writes, so it may raise, hang or die: engine/reward_pool.py runs it.
"""

import json
from collections.abc import Callable

ScoreFunction = Callable[[str, str, str], float]
"""`score(task, answer, response)`."""


def score(task: str, answer: str, response: str) -> float:
    """Reward of a response, where `answer` is what the task's Problem says.

    Raises ValueError for an unknown task or an answer that is not in the task's form, and whatever a library raises:
    an error of ours must not look like an error of the policy's.
    """
    if task == "addition":
        return _score_addition(answer, response)
    if task == "gsm8k":
        return _score_gsm8k(answer, response)
    if task.startswith("reasoning_gym:"):
        return _score_reasoning_gym(task.removeprefix("reasoning_gym:"), answer, response)
    if task.startswith("sums:"):
        from data.tasks import Sums

        return Sums.score(answer, response)
    raise ValueError(f"unknown task {task!r}; tasks are addition, gsm8k and reasoning_gym:NAME")


def _score_addition(answer: str, response: str) -> float:
    """1 for the exact labelled digits, 0 for anything else; spaces do not count, as detokenizers differ in them."""
    if not answer.strip():
        raise ValueError("the answer of an addition problem is empty")
    return float("".join(response.split()) == "".join(answer.split()))


def _score_gsm8k(answer: str, response: str) -> float:
    """1 if the last number of the response, boxed or not, equals the answer, by math-verify."""
    from math_verify import parse, verify

    float(answer)  # ValueError: math-verify would parse anything
    # No time-outs of its own: they use SIGALRM, and the pool has one.
    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None, raise_on_error=True)
    found = parse(response, parsing_timeout=None, raise_on_error=True)
    return float(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def _score_reasoning_gym(name: str, answer: str, response: str) -> float:
    """The dataset's own score, in [0, 1], of what stands between the last <answer> tags."""
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    return float(get_score_answer_fn(name)(extract_answer(response), json.loads(answer)))
