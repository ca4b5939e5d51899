import pytest
import torch

from algos.proximal import loglinear

CURRENT = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
BEHAVIOR = torch.tensor([-1.5, -1.0, -2.5, -3.0], dtype=torch.float64)
LAGS = torch.tensor([0, 1, 3, 16])


@pytest.mark.parametrize("progress", [0.25, 0.5, 0.75])
def test_it_interpolates_by_version_as_the_formula_says(progress):
    version = 20
    found = loglinear(CURRENT, BEHAVIOR, LAGS, progress).tolist()
    rows = zip(CURRENT.tolist(), BEHAVIOR.tolist(), LAGS.tolist(), strict=True)
    for value, (current, behavior, lag) in zip(found, rows, strict=True):
        sampled_by = version - lag
        share = (version - sampled_by) / (version + progress - sampled_by)
        assert value == pytest.approx(behavior + share * (current - behavior), rel=1e-14)


def test_before_the_first_update_it_is_the_current_policy_exactly_and_without_gradient():
    current = CURRENT.clone().requires_grad_()
    found = loglinear(current, BEHAVIOR, LAGS, 0.0)
    assert torch.equal(found, CURRENT) and not found.requires_grad


def test_a_fresh_token_later_in_the_step_has_the_policy_that_sampled_it():
    current = CURRENT.clone().requires_grad_()
    found = loglinear(current, BEHAVIOR, torch.zeros(4, dtype=torch.int64), 0.5)
    assert torch.equal(found, BEHAVIOR) and not found.requires_grad


def test_it_is_exact_where_log_probs_move_linearly_with_the_version():
    # A token sampled at version 2 whose log-prob falls by 0.1 a version, seen half way from version 5 to version 6.
    found = loglinear(torch.tensor([-1.35]), torch.tensor([-1.0]), torch.tensor([3]), 0.5)
    torch.testing.assert_close(found, torch.tensor([-1.3]))


@pytest.mark.parametrize(
    ("current", "behavior", "version", "sampled_by", "expected"),
    [
        # AReaL, tests/test_prox_approx.py: test_basic_loglinear_interpolation, test_mixed_versions_in_batch and
        # test_alpha_clamping. Its proximal policy is one version behind the current one: the last update of a step.
        ([-1.5, -2.5, -3.5], [-1.0, -2.0, -3.0], 2, [0, 0, 0], [-1.25, -2.25, -3.25]),
        ([-1.5, -2.2], [-1.0, -2.0], 4, [0, 2], [-1.375, -2.1]),
        ([-2.0], [-1.0], 5, [4], [-1.0]),
    ],
)
def test_a_whole_step_after_the_proximal_policy_it_is_that_of_areal(
    current, behavior, version, sampled_by, expected
):
    lags = version - 1 - torch.tensor(sampled_by)
    logs = [torch.tensor(values, dtype=torch.float64) for values in (current, behavior)]
    assert loglinear(*logs, lags, progress=1.0).tolist() == pytest.approx(expected, abs=1e-5)


def test_float32_stays_float32():
    assert loglinear(CURRENT.float(), BEHAVIOR.float(), LAGS, 0.5).dtype == torch.float32
