import dataclasses
from collections import Counter
from statistics import fmean, pstdev

import numpy as np
import pytest
from trajectories import make_trajectory

from asyncrl.config import AdvantageOptions, Config
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.ledger import COUNTS, ledger_metrics
from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP, Group
from asyncrl.runlog.metrics import batch_metrics, merge_nodes, time_metrics

VERSION, DELAY, MAX_TOKENS, OVERLONG = 6, 1, 48, 45


def random_group(rng, group_id, parts):
    """Three trajectories, whose rewards have these parts, by their names; in some groups all rewards are equal."""
    members = []
    for member in range(3):
        versions = np.sort(rng.integers(2, VERSION, rng.integers(1, 40)))
        trajectory = make_trajectory(group_id, member, versions, rng.choice(["stop", "length"]))
        reward_parts = {name: float(rng.normal()) for name in parts}
        reward = 1.5 if group_id % 2 else float(rng.normal())
        turns = int(rng.integers(1, 4))
        members.append(
            dataclasses.replace(
                trajectory, reward=reward, reward_parts=reward_parts, num_turns=turns
            )
        )
    return Group(group_id, tuple(members))


def formula(groups):
    """The metrics of a batch, from plain lists of numbers."""
    members = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [t.reward for t in members]
    versions = [[v for v in t.policy_versions.tolist() if v >= 0] for t in members]
    lengths = [len(column) for column in versions]
    tokens = [version for column in versions for version in column]
    equal = [len({t.reward for t in group.trajectories}) == 1 for group in groups]
    free = MAX_TOKENS - OVERLONG
    parts = {name: [t.reward_parts.get(name, 0) for t in members] for name in ("climax", "rare")}
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/zero_variance_groups": fmean(equal),
        "reward/overlong_penalty": fmean(max(0, num - free) / OVERLONG for num in lengths),
        **{f"reward/{name}": fmean(numbers) for name, numbers in parts.items()},
        "response/length_mean": fmean(lengths),
        "response/length_max": max(lengths),
        "response/cut": fmean(t.finish_reason == "length" for t in members),
        "response/turns_mean": fmean(t.num_turns for t in members),
        "response/inherited_share": fmean(version < VERSION - DELAY for version in tokens),
        "response/mixed_versions": fmean(len(set(column)) > 1 for column in versions),
    }


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_metrics_of_any_number_of_nodes_are_those_of_the_whole_batch(num_nodes):
    rng = np.random.default_rng(1)
    groups = [random_group(rng, i, ["rare"] if i == 4 else ["climax"]) for i in range(12)]
    options = AdvantageOptions(overlong_tokens=OVERLONG)
    config = Config(publish_delay=DELAY, advantage_options=options, max_response_tokens=MAX_TOKENS)
    nodes = [
        batch_metrics(groups[node::num_nodes], VERSION, config, num_nodes)
        for node in range(num_nodes)
    ]
    assert merge_nodes(nodes) == pytest.approx(formula(groups), rel=1e-12)
    without = merge_nodes([batch_metrics(groups, VERSION, Config())])
    assert "reward/overlong_penalty" not in without


@pytest.mark.parametrize("greedy", [{}, {"eval/greedy_accuracy": 0.75}])
def test_accuracy_is_over_all_problems_asked_also_greedily_and_a_failed_response_counts_0(greedy):
    rewards = {EVALUATION_GROUP: [1.0, 0.0, 1.0, None]}
    if greedy:
        rewards[GREEDY_GROUP] = [1.0, 1.0, 1.0, None]
    evaluation = Evaluation(3, 4 * len(rewards))
    for group_id, numbers in rewards.items():
        for reward in numbers:
            reason, failure = ("failed", "it raised") if reward is None else ("stop", "")
            trajectory = make_trajectory(group_id, 0, (3,), reason)
            trajectory = dataclasses.replace(trajectory, reward=reward or 0.0, failure=failure)
            is_last = evaluation.add(trajectory)
    assert is_last and evaluation.metrics() == greedy | {
        "eval/accuracy": 0.5,
        "eval/policy_version": 3,
        "eval/problems": 3 * len(rewards),
        "eval/failed": len(rewards),
    }
    with pytest.raises(RuntimeError, match=r"version 3 got tokens of versions \[2, 3\]"):
        Evaluation(3, 1).add(make_trajectory(EVALUATION_GROUP, 0, (2, 3)))


def test_what_is_dropped_on_one_node_alone_is_measured_against_what_all_consume():
    counts = dict.fromkeys(COUNTS, 0) | {"tokens_generated": 4}
    dropped = {"measured": 1, "length": 25.0, "reward": -0.5}
    consumed = {"measured": 2, "length": 20.0, "reward": 1.0}
    one, other = (
        ledger_metrics(Counter(counts | {f"{name}_{fate}": sums[name] for name in sums}))
        for fate, sums in (("dropped_shut_out", dropped), ("consumed", consumed))
    )
    expected = {f"ledger/{name}": 0 for name in COUNTS}
    expected |= {"ledger/tokens_generated": 12, "tokens/generated": 12}
    bias = {"dropped/shut_out_length_ratio": 2.5, "dropped/shut_out_reward_gap": -1.0}
    assert merge_nodes([one, other, other]) == expected | bias
    assert merge_nodes([one, one, one]) == expected, "nothing to compare"


def test_a_steps_time_is_split_into_shares_that_sum_to_1():
    trainer = Counter(
        wait=4_000,
        evaluate=1_000,
        gather=500,
        forward_backward=2_500,
        optimizer=1_000,
        publish=1_000,
    )
    metrics = time_metrics(trainer)
    times = {name: 1e6 * metrics[f"time/{name}_s"] for name in ("step", "wait", "train", "publish")}
    assert times == pytest.approx({"step": 10, "wait": 5, "train": 4, "publish": 1})
    assert metrics["trainer_time/wait"] == 0.4 and metrics["trainer_time/save"] == 0
    shares = [share for name, share in metrics.items() if name.startswith("trainer_time/")]
    assert sum(shares) == pytest.approx(1)
