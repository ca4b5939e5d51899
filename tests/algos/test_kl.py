import math

import pytest
import torch

from algos import KL_ESTIMATORS

FORMULAS = {  # of log π, log π_ref and log π_behavior of one token
    "k1": lambda p, ref, b: p - ref,
    "k2": lambda p, ref, b: (p - ref) ** 2 / 2,
    "k3": lambda p, ref, b: math.exp(ref - p) - 1 - (ref - p),
    "unbiased": lambda p, ref, b: math.exp(p - b) * (math.exp(ref - p) - 1 - (ref - p)),
}


def divergence(p, q):
    """KL(p ‖ q) from log-probs."""
    return (p.exp() * (p - q)).sum()


def value_and_gradient(value, logits):
    return value.item(), torch.autograd.grad(value, logits, retain_graph=True)[0]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_and_gradients_equal_the_formula(name):
    generator = torch.Generator().manual_seed(1)
    p, ref, behavior = -3 * torch.rand(3, 40, generator=generator, dtype=torch.float64)
    p.requires_grad_()
    values = KL_ESTIMATORS[name](p, ref, behavior)
    (slopes,) = torch.autograd.grad(values.sum(), p)
    rows = zip(p.tolist(), ref.tolist(), behavior.tolist(), strict=True)
    for value, slope, (at, *others) in zip(values.tolist(), slopes.tolist(), rows, strict=True):
        assert value == pytest.approx(FORMULAS[name](at, *others), rel=1e-12, abs=1e-14)
        difference = FORMULAS[name](at + 1e-6, *others) - FORMULAS[name](at - 1e-6, *others)
        assert slope == pytest.approx(difference / 2e-6, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_expected_values_and_gradients_are_those_that_the_docstring_names(is_fresh):
    generator = torch.Generator().manual_seed(0)
    logits, ref, behavior = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, ref, behavior = logits.log_softmax(0), ref.log_softmax(0), behavior.log_softmax(0)
    sampler = policy.detach() if is_fresh else behavior
    right, reverse = value_and_gradient(divergence(policy, ref), logits)
    _, forward = value_and_gradient(divergence(ref, policy), logits)
    fresh = {"k1": torch.zeros_like(reverse), "k2": reverse, "k3": forward, "unbiased": reverse}
    for name, estimator in KL_ESTIMATORS.items():
        # over all actions, with the gradient that sampling would have on average
        expectation = (sampler.exp() * estimator(policy, ref, sampler)).sum()
        value, slopes = value_and_gradient(expectation, logits)
        if is_fresh or name == "unbiased":
            torch.testing.assert_close(slopes, fresh[name], rtol=1e-10, atol=1e-12)
            assert (value == pytest.approx(right)) == (name != "k2")
        else:
            assert abs(value / right - 1) > 0.05
            assert (slopes - reverse).norm() > 0.1 * reverse.norm()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_probs_give_finite_values_and_gradients_of_the_same_type(name, dtype):
    levels = torch.cartesian_prod(*[torch.tensor([-50.0, -25.0, 0.0], dtype=dtype)] * 3)
    p, ref, behavior = levels.unbind(1)
    p = p.clone().requires_grad_()
    values = KL_ESTIMATORS[name](p, ref, behavior)
    (slopes,) = torch.autograd.grad(values.sum(), p)
    assert values.dtype == dtype and torch.isfinite(values).all() and torch.isfinite(slopes).all()


def test_a_token_that_the_policy_all_but_excludes_costs_a_finite_amount():
    p, ref, behavior = (torch.tensor([value]) for value in (-1e4, -1.0, -2.0))
    assert KL_ESTIMATORS["unbiased"](p, ref, behavior).item() == pytest.approx(math.e)
    # where a ratio is cut
    assert KL_ESTIMATORS["k3"](p, ref, behavior).item() == pytest.approx(math.exp(20) - 21)
