"""The samples of a step for people, in samples.jsonl."""

import json
from collections.abc import Callable, Iterator

import numpy as np

from asyncrl.records import Group, Trajectory


def choose_samples(
    step: int,
    groups: list[Group],
    decode: Callable[[np.ndarray], str],
    answer_of: Callable[[Group], str],
    which: str = "two",
) -> Iterator[dict]:
    """Yield fields of samples.jsonl: for `which`, see --log-samples.

    If rewards are equal in every group, `two` is the first member of the first group. `answer_of` returns the right
    answer, or an empty text.
    """
    first = next((group for group in groups if np.ptp(group.rewards) > 0), groups[0])
    for group in groups if which == "all" else [first]:
        members = range(len(group.trajectories))
        if which == "two":
            members = dict.fromkeys([int(group.rewards.argmax()), int(group.rewards.argmin())])
        answer = answer_of(group)
        for index in members:
            member = group.trajectories[index]
            yield {
                "step": step,
                "group": group.group_id,
                "member": member.member,
                **describe_trajectory(member, answer, decode),
                "group_reward": float(group.rewards.mean()),
                "oldest_version": member.oldest_version,
                "newest_version": int(member.policy_versions.max()),
                "staleness": step - 1 - member.oldest_version,
            }


def readable_answer(answer: str) -> object:
    """Return an answer for people. That of a row, a JSON object, is its own `answer` or its columns but the prompt."""
    try:
        row = json.loads(answer)
    except ValueError:
        return answer
    if not isinstance(row, dict):
        return answer
    columns = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
    return columns.get("answer", columns)


def describe_trajectory(
    trajectory: Trajectory, answer: str, decode: Callable[[np.ndarray], str]
) -> dict:
    """Return the texts `prompt` and `response`, the end and the reward (NaN for a failed one).

    The right answer is there unless it is empty, and the list `branches` if an agent's trajectory has some. An
    environment of several turns also has `last_observation` and `turn_rewards`.
    """
    mask = trajectory.loss_mask
    start = int(mask.argmax()) if mask.any() else len(mask)
    first, *branches = trajectory.segments
    described = {
        "prompt": decode(trajectory.tokens[:start]),
        "response": decode(trajectory.tokens[start : first.stop]),
        "turns": trajectory.num_turns,
        "finish_reason": trajectory.finish_reason,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
    }
    if answer:
        described["answer"] = readable_answer(answer)
    if branches:
        described["branches"] = [decode(trajectory.tokens[branch]) for branch in branches]
    if trajectory.turn_rewards:
        described["last_observation"] = trajectory.last_observation
        described["turn_rewards"] = list(trajectory.turn_rewards)
    return described
