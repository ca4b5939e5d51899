"""Random loss inputs, and the checks that every loss is put through; slow and obvious, in float64."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from algos import LossInputs

# loss of one token from (logp, logp held constant, behavior logp, advantage), in plain Python floats
TokenOracle = Callable[[float, float, float, float], float]


def random_inputs(num_tokens: int = 60, seed: int = 0, spread: float = 0.5) -> LossInputs:
    """Off-policy tokens of about six sequences, float64; `spread` is the std of the log-ratio, nats."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    behavior = -normal().abs() - 1.0
    sequence_ids = torch.arange(num_tokens) // 10
    return LossInputs(
        logprobs=(behavior + spread * normal()).requires_grad_(),
        behavior_logprobs=behavior,
        proximal_logprobs=behavior + spread * normal(),
        advantages=normal()[sequence_ids],
        rewards=normal()[sequence_ids],
        sequence_ids=sequence_ids,
    )


def one_token(log_ratio: float, advantage: float) -> LossInputs:
    """A single token with a given log π − log π_behavior, nats, and advantage; float64."""
    behavior = torch.tensor([-2.0], dtype=torch.float64)
    value = torch.tensor([advantage], dtype=torch.float64)
    logprobs = (behavior + log_ratio).requires_grad_()
    return LossInputs(logprobs, behavior, behavior.clone(), value, value, torch.zeros(1, dtype=torch.int64))


def gradient(loss: Callable, inputs: LossInputs) -> Tensor:
    """d Σ loss / d logprobs, [N]."""
    return torch.autograd.grad(loss(inputs)[0].sum(), inputs.logprobs)[0]


def check_values_and_gradients(loss: Callable, oracle: TokenOracle, inputs: LossInputs) -> None:
    """Compare with the oracle token by token, and its gradient with central differences of the oracle."""
    losses, _ = loss(inputs)
    slopes = gradient(loss, inputs)
    step = 1e-6
    rows = zip(inputs.logprobs.tolist(), inputs.behavior_logprobs.tolist(), inputs.advantages.tolist(), strict=True)
    for t, (logprob, behavior, advantage) in enumerate(rows):
        expected = oracle(logprob, logprob, behavior, advantage)
        assert math.isclose(losses[t].item(), expected, rel_tol=1e-12, abs_tol=1e-12)
        higher = oracle(logprob + step, logprob, behavior, advantage)
        lower = oracle(logprob - step, logprob, behavior, advantage)
        assert math.isclose(slopes[t].item(), (higher - lower) / (2 * step), rel_tol=1e-6, abs_tol=1e-6)


def check_tokens_are_independent(loss: Callable, inputs: LossInputs) -> None:
    """The loss of a token is the same without the other tokens, and has no gradient to them."""
    losses, _ = loss(inputs)
    for t in (0, 17, len(losses) - 1):
        kept = {name: getattr(inputs, name)[t : t + 1] for name in inputs.__dataclass_fields__}
        alone, _ = loss(LossInputs(**kept))
        assert alone.item() == losses[t].item()
        (slopes,) = torch.autograd.grad(losses[t], inputs.logprobs, retain_graph=True)
        assert torch.count_nonzero(slopes).item() <= 1 and torch.count_nonzero(slopes[:t]).item() == 0


def check_on_policy_gradient(loss: Callable, inputs: LossInputs) -> None:
    """Where current and behavior policy agree, the gradient is that of plain policy gradient: −A."""
    on_policy = replace(inputs, logprobs=inputs.behavior_logprobs.clone().requires_grad_())
    torch.testing.assert_close(gradient(loss, on_policy), -inputs.advantages, rtol=1e-12, atol=1e-12)


def check_stats(stats: dict[str, Tensor], names: set[str], num_tokens: int) -> None:
    """Stats have these names, one finite detached number per token."""
    assert set(stats) == names
    for values in stats.values():
        assert values.shape == (num_tokens,) and not values.requires_grad and torch.isfinite(values).all()
