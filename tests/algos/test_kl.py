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


def evaluate(name, p, *others):
    """Values and their slopes, [N] each, of log-probs [N]."""
    p = p.clone().requires_grad_()
    values = KL_ESTIMATORS[name](p, *others)
    return values, torch.autograd.grad(values.sum(), p)[0]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_and_gradients_equal_the_formula(name):
    generator = torch.Generator().manual_seed(1)
    logprobs = -3 * torch.rand(3, 40, generator=generator, dtype=torch.float64)
    columns = (*evaluate(name, *logprobs), *logprobs)
    for value, slope, at, *others in torch.stack(columns, dim=1).tolist():
        assert value == pytest.approx(FORMULAS[name](at, *others), rel=1e-12, abs=1e-14)
        difference = FORMULAS[name](at + 1e-6, *others) - FORMULAS[name](at - 1e-6, *others)
        assert slope == pytest.approx(difference / 2e-6, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_probs_give_finite_values_and_gradients_of_the_same_type(name, dtype):
    levels = torch.cartesian_prod(*[torch.tensor([-1e4, -25.0, 0.0], dtype=dtype)] * 3)
    for column in evaluate(name, *levels[levels[:, 2] > -1e4].unbind(1)):
        assert column.dtype == dtype and torch.isfinite(column).all()
