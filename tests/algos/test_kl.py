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
SLOPES = {  # d estimator / d log π, by hand
    "k1": lambda p, ref, b: 1.0,
    "k2": lambda p, ref, b: p - ref,
    "k3": lambda p, ref, b: 1 - math.exp(ref - p),
    "unbiased": lambda p, ref, b: math.exp(p - b) * (p - ref),
}


def random_policies(num_actions=7):
    """Logits of a policy (with gradient), and log-probs of a reference and of the policy that sampled; float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, num_actions, generator=generator, dtype=torch.float64)
    return logits[0].clone().requires_grad_(), logits[1].log_softmax(0), logits[2].log_softmax(0)


def expectation(name, logits, ref, behavior):
    """Σ_a behavior(a)·estimator(a): exact, over all actions, with the gradient that sampling would have on average."""
    return (behavior.exp() * KL_ESTIMATORS[name](logits.log_softmax(0), ref, behavior)).sum()


def divergence(p, q):
    """KL(p ‖ q) from log-probs."""
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_and_gradients_equal_the_formula(name):
    generator = torch.Generator().manual_seed(1)
    p, ref, behavior = -3 * torch.rand(3, 40, generator=generator, dtype=torch.float64)
    p.requires_grad_()
    values = KL_ESTIMATORS[name](p, ref, behavior)
    (slopes,) = torch.autograd.grad(values.sum(), p)
    for t, row in enumerate(zip(p.tolist(), ref.tolist(), behavior.tolist(), strict=True)):
        assert values[t].item() == pytest.approx(FORMULAS[name](*row), rel=1e-12, abs=1e-14)
        assert slopes[t].item() == pytest.approx(SLOPES[name](*row), rel=1e-12, abs=1e-14)
        difference = FORMULAS[name](row[0] + 1e-6, *row[1:]) - FORMULAS[name](
            row[0] - 1e-6, *row[1:]
        )
        assert slopes[t].item() == pytest.approx(difference / 2e-6, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_at_the_reference_the_penalty_is_zero_and_only_k1_pushes(name):
    p = torch.tensor([-0.5, -3.0], dtype=torch.float64, requires_grad=True)
    values = KL_ESTIMATORS[name](p, p.detach(), p.detach() - 0.3)
    (slopes,) = torch.autograd.grad(values.sum(), p)
    assert values.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)
    assert slopes.tolist() == pytest.approx([1.0, 1.0] if name == "k1" else [0.0, 0.0], abs=1e-15)


@pytest.mark.parametrize("name", ["k1", "k3", "unbiased"])
def test_on_fresh_tokens_the_expected_value_is_the_divergence(name):
    logits, ref, _ = random_policies()
    policy = logits.log_softmax(0).detach()
    assert expectation(name, logits, ref, policy).item() == pytest.approx(
        divergence(policy, ref).item()
    )


def test_on_stale_tokens_only_the_unbiased_estimator_has_the_right_value():
    logits, ref, behavior = random_policies()
    right = divergence(logits.log_softmax(0), ref).item()
    found = {name: expectation(name, logits, ref, behavior).item() for name in KL_ESTIMATORS}
    assert found["unbiased"] == pytest.approx(right)
    assert all(abs(value / right - 1) > 0.05 for name, value in found.items() if name != "unbiased")


def test_expected_gradients_on_fresh_tokens_are_those_that_the_docstring_names():
    logits, ref, _ = random_policies()
    policy = logits.log_softmax(0)
    reverse = torch.autograd.grad(divergence(policy, ref), logits, retain_graph=True)[0]
    forward = torch.autograd.grad(divergence(ref, policy), logits)[0]
    expected = {"k1": torch.zeros_like(reverse), "k2": reverse, "k3": forward, "unbiased": reverse}
    for name, gradient in expected.items():
        (found,) = torch.autograd.grad(expectation(name, logits, ref, policy.detach()), logits)
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)


def test_on_stale_tokens_only_the_unbiased_estimator_has_the_gradient_of_the_divergence():
    logits, ref, behavior = random_policies()
    (right,) = torch.autograd.grad(divergence(logits.log_softmax(0), ref), logits)
    for name in KL_ESTIMATORS:
        (found,) = torch.autograd.grad(expectation(name, logits, ref, behavior), logits)
        error = ((found - right).norm() / right.norm()).item()
        assert error < 1e-12 if name == "unbiased" else error > 0.1, name


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_probs_give_finite_values_and_gradients_of_the_same_type(name, dtype):
    levels = torch.cartesian_prod(*[torch.tensor([-50.0, -25.0, 0.0], dtype=dtype)] * 3)
    p, ref, behavior = levels.unbind(1)
    p = p.clone().requires_grad_()
    values = KL_ESTIMATORS[name](p, ref, behavior)
    (slopes,) = torch.autograd.grad(values.sum(), p)
    assert values.dtype == dtype and torch.isfinite(values).all() and torch.isfinite(slopes).all()


def test_a_token_that_the_policy_all_but_excludes_costs_the_unbiased_estimator_a_finite_amount():
    p, ref, behavior = (torch.tensor([value]) for value in (-1e4, -1.0, -2.0))
    assert KL_ESTIMATORS["unbiased"](p, ref, behavior).item() == pytest.approx(math.e)
    # where a ratio is cut
    assert KL_ESTIMATORS["k3"](p, ref, behavior).item() == pytest.approx(math.exp(20) - 21)
