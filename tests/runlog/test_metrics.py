import dataclasses
from collections import Counter

import numpy as np
import pytest
from trajectories import make_group, make_trajectory

from algos.advantages import overlong_penalty
from asyncrl.config import AdvantageOptions, Config
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.ledger import COUNTS, ledger_metrics
from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP, Group
from asyncrl.runlog.metrics import (
    Max,
    Mean,
    Sum,
    batch_metrics,
    over_nodes,
    time_metrics,
    training_metrics,
)


def metrics_of(groups, policy_version, config):
    """The metrics of a batch on one node."""
    return over_nodes([batch_metrics(groups, policy_version, config)])


def test_staleness_counts_from_the_oldest_token_of_each_trajectory():
    group = Group(0, (make_trajectory(0, 0, (3, 5)), make_trajectory(0, 1, (5, 5))))
    metrics = metrics_of([group], 5, Config())
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2)
    assert metrics["staleness/token_mean"] == pytest.approx(0.5)
    assert metrics["response/mixed_versions"] == 0.5


def test_rewards_are_over_the_batch_and_zero_variance_over_its_groups():
    metrics = metrics_of([make_group(0, (1.0, 1.0)), make_group(1, (0.0, 1.0))], 0, Config())
    assert metrics["reward/mean"] == 0.75 and metrics["reward/zero_variance_groups"] == 0.5


def test_each_part_of_the_rewards_has_its_mean_over_the_batch_where_a_trajectory_without_it_counts_0():
    one, other, *_ = trajectories = [make_trajectory(0, member) for member in range(4)]
    trajectories[:2] = (
        dataclasses.replace(one, reward=3.0, reward_parts={"right": 1.0, "length": 2.0}),
        dataclasses.replace(other, reward=1.0, reward_parts={"right": 1.0}),
    )
    metrics = metrics_of([Group(0, tuple(trajectories))], 0, Config())
    assert (
        metrics["reward/right"] == 0.5
        and metrics["reward/length"] == 0.5
        and metrics["reward/mean"] == 1.0
    )


def test_what_rewards_lose_by_length_has_its_mean_and_leaves_the_rewards_as_they_are():
    """Responses of 2, 4 and 6 tokens, of 6 at most, where all above 2 lose."""
    members = tuple(make_trajectory(0, i, (0,) * num) for i, num in enumerate((2, 4, 6)))
    config = Config(max_response_tokens=6, advantage_options=AdvantageOptions(overlong=4))
    assert [overlong_penalty(t.num_beyond_prompt, 6, 4) for t in members] == [0.0, 0.5, 1.0]
    with_it, without = (
        metrics_of([Group(0, members)], 0, of) for of in (config, Config(max_response_tokens=6))
    )
    assert (
        with_it == without | {"reward/overlong_penalty": 0.5}
        and "reward/overlong_penalty" not in without
    )


def test_training_stats_get_their_names_in_the_log():
    stats = {
        "loss": 1.0,
        "tokens": 8.0,
        "tokens/lag_0": 8.0,
        "drift/k3": 0.1,
        "ratio": 1.0,
        "ratio/lag_0": 1.0,
    }
    assert set(training_metrics(stats | {"tokens/forward": 9.0})) == {
        "loss/total", "tokens/trained", "tokens/trained_lag_0", "drift/k3", "loss/ratio", "loss/ratio/lag_0",
        "tokens/forward",
    }  # fmt: skip


def evaluation_metrics(*answers):
    """The metrics of an evaluation at version 3, of (group_id, reward) each; a reward of None has failed."""
    trajectories = []
    for group_id, reward in answers:
        trajectory = make_trajectory(group_id, 0)
        reason = {"finish_reason": "failed"} if reward is None else {"reward": reward}
        trajectories.append(dataclasses.replace(trajectory, **reason))
    return Evaluation(3, len(trajectories), trajectories).metrics()


def test_accuracy_is_over_all_problems_asked_and_a_failed_response_counts_0():
    failed = (EVALUATION_GROUP, None)
    right, wrong = (EVALUATION_GROUP, 1.0), (EVALUATION_GROUP, 0.0)
    assert evaluation_metrics(right, wrong, right, failed) == {
        "eval/accuracy": 0.5, "eval/policy_version": 3, "eval/problems": 3, "eval/failed": 1,
    }  # fmt: skip
    assert evaluation_metrics(failed, failed)["eval/accuracy"] == 0.0


def test_greedy_answers_have_an_accuracy_of_their_own():
    greedy = [(GREEDY_GROUP, 1.0)] * 3
    metrics = evaluation_metrics((EVALUATION_GROUP, 0.0), *greedy, (GREEDY_GROUP, None))
    assert (metrics["eval/accuracy"], metrics["eval/greedy_accuracy"]) == (0.0, 0.75)


def test_what_is_dropped_on_one_node_alone_is_measured_against_what_all_consume():
    consumed = {"measured_consumed": 2, "length_consumed": 20.0, "reward_consumed": 1.0}
    dropped = {
        "measured_dropped_shut_out": 1,
        "length_dropped_shut_out": 25.0,
        "reward_dropped_shut_out": -0.5,
    }
    one, other = (
        ledger_metrics(Counter(dict.fromkeys(COUNTS, 0) | sums)) for sums in (dropped, consumed)
    )
    assert bias_in(over_nodes([one, other, other])) == {
        "dropped/shut_out_length_ratio": 2.5,
        "dropped/shut_out_reward_gap": -1.0,
    }
    assert bias_in(over_nodes([one])) == {}, "nothing to compare"


def bias_in(metrics):
    """The metrics of how dropped groups differ from those consumed."""
    return {name: value for name, value in metrics.items() if name.startswith("dropped/")}


def test_inherited_tokens_are_those_sampled_before_the_newest_weights():
    group = Group(0, (make_trajectory(0, 0, (1, 2, 2)), make_trajectory(0, 1, (2,))))
    assert metrics_of([group], 2, Config())["response/inherited_share"] == 0.25
    assert metrics_of([group], 3, Config(publish_delay=1))["response/inherited_share"] == 0.25


def test_metrics_over_nodes_are_those_of_the_whole_batch():
    rng = np.random.default_rng(0)

    def group(group_id):
        lengths, rewards = rng.integers(1, 9, 2), rng.normal(size=2)
        members = [
            make_trajectory(group_id, m, rng.integers(1, 5, n)) for m, n in enumerate(lengths)
        ]
        # in the second node alone
        parts = {"climax": float(rewards[0])} if group_id != 4 else {"rare": 8.0}
        members = [
            dataclasses.replace(t, reward=float(r), reward_parts=parts)
            for t, r in zip(members, rewards, strict=True)
        ]
        return Group(group_id, tuple(members))

    nodes = [[group(3 * node + i) for i in range(3)] for node in range(4)]
    config = Config(publish_delay=1, advantage_options=AdvantageOptions(overlong=47))
    whole = metrics_of([group for groups in nodes for group in groups], 5, config)
    found = over_nodes(batch_metrics(groups, 5, config, num_nodes=4) for groups in nodes)
    assert found == pytest.approx(whole, rel=1e-12) and found.keys() == whole.keys()


def test_the_type_of_a_metric_and_not_its_name_says_how_nodes_become_one():
    nodes = (
        {"a/max": Sum(2), "b": Mean(3.0, 2), "c": Max(1.0)},
        {"a/max": Sum(5), "b": Mean(6.0, 1), "c": Max(4.0), "d_mean": Max(0.5)},
        {"c": Max(2.0)},
    )
    assert over_nodes(nodes) == {"a/max": 7, "b": 3.0, "c": 4.0, "d_mean": 0.5}
    nothing = {"mean": Mean(0, 0)}
    assert over_nodes([{"count": Sum(0), "largest": Max(3)}, nothing]) == {"count": 0, "largest": 3}


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
    assert (
        metrics["time/step_s"] == 10e-6
        and metrics["time/wait_s"] == 5e-6
        and metrics["time/train_s"] == 4e-6
    )
    assert metrics["trainer_time/wait"] == 0.4 and metrics["trainer_time/save"] == 0
    shares = [share for name, share in metrics.items() if name.startswith("trainer_time/")]
    assert sum(shares) == pytest.approx(1)
