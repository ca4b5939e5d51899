import pytest
from test_batch import make_group
from test_buffer import make_trajectory

from data.records import Group
from evaluation import Evaluation
from llm_proxy import SampledTokens
from metrics import batch_metrics, evaluation_metrics, rollout_metrics, training_metrics


def test_staleness_counts_from_the_oldest_token_of_each_trajectory():
    group = Group(0, (make_trajectory(0, 0, (3, 5)), make_trajectory(0, 1, (5, 5))))
    metrics = batch_metrics([group], policy_version=5)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2)
    assert metrics["staleness/token_mean"] == pytest.approx(0.5)
    assert metrics["response/mixed_versions"] == 0.5


def test_rewards_are_over_the_batch_and_zero_variance_over_its_groups():
    metrics = batch_metrics([make_group(0, (1.0, 1.0)), make_group(1, (0.0, 1.0))], policy_version=0)
    assert metrics["reward/mean"] == 0.75 and metrics["reward/zero_variance_groups"] == 0.5


def test_training_stats_get_their_names_in_the_log():
    stats = {"loss": 1.0, "tokens": 8.0, "tokens/lag_0": 8.0, "drift/k3": 0.1, "ratio": 1.0, "ratio/lag_0": 1.0}
    assert set(training_metrics(stats | {"tokens/forward": 9.0})) == {
        "loss/total", "tokens/trained", "tokens/trained_lag_0", "drift/k3", "loss/ratio", "loss/ratio/lag_0",
        "tokens/forward",
    }  # fmt: skip


def test_nothing_is_logged_of_an_evaluation_that_has_not_ended():
    assert evaluation_metrics([]) == {}
    ended = Evaluation(3, set(), [make_trajectory(-1, 0)], num_failed=1)
    assert evaluation_metrics([Evaluation(1, set()), ended])["eval/policy_version"] == 3


def test_tokens_per_second_are_those_of_this_step():
    sampled = SampledTokens(new=40, resumed=10, discarded=5)
    measured = {"ledger": {"tokens_generated": 500}, "pause_s": [0.1, 0.3], "num_restarts": 0, "sampled": sampled}
    metrics = rollout_metrics(measured, previous_tokens=300, step_s=2.0)
    assert metrics["rollout/tokens_per_s"] == 100 and metrics["rollout/pause_s"] == pytest.approx(0.2)
    assert metrics["rollout/resumed_share"] == 0.25 and metrics["rollout/discarded_tokens"] == 5


def test_inherited_tokens_are_those_sampled_before_the_newest_weights():
    group = Group(0, (make_trajectory(0, 0, (1, 2, 2)), make_trajectory(0, 1, (2,))))
    assert batch_metrics([group], policy_version=2)["response/inherited_share"] == 0.25
    assert batch_metrics([group], policy_version=3, publish_delay=1)["response/inherited_share"] == 0.25
