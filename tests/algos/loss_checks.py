"""Random loss inputs, and the checks that every loss is put through; slow and obvious, in float64."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algos import LossInputs


@dataclass(frozen=True)
class Token:
    """One trained token in plain Python floats, for the oracles."""

    logprob: float
    held: float
    """The same number, for where the formula stops the gradient: finite differences leave it alone."""
    behavior: float
    proximal: float
    advantage: float
    reward: float


SequenceOracle = Callable[[list[Token]], list[float]]
"""Losses of the tokens of one sequence, from the formula."""


def each(oracle: Callable[[Token], float]) -> SequenceOracle:
    """The oracle of a loss that looks at one token at a time."""
    return lambda tokens: [oracle(token) for token in tokens]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def random_inputs(
    num_tokens: int = 60, seed: int = 0, spread: float = 0.5, tokens_per_sequence: int = 10
):
    """Off-policy tokens of about six sequences, float64 LossInputs; `spread` is the std of the log-ratios, nats."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    behavior = -normal().abs() - 1.0
    sequence_ids = torch.arange(num_tokens) // tokens_per_sequence
    return LossInputs(
        logprobs=(behavior + spread * normal()).requires_grad_(),
        behavior_logprobs=behavior,
        proximal_logprobs=behavior + spread * normal(),
        advantages=normal()[sequence_ids],
        rewards=normal()[sequence_ids],
        sequence_ids=sequence_ids,
    )


def within(loss: Callable, update: LossInputs) -> Callable:
    """The loss of micro-batches of an update, which it is handed if it couples tokens and has none yet."""
    parameter = inspect.signature(loss).parameters.get("update")
    if parameter is None or parameter.default is not parameter.empty:
        return loss
    return functools.partial(loss, update=update.to("cpu"))


def evaluate(loss: Callable, inputs: LossInputs, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and stats of a micro-batch that is a whole update."""
    return within(loss, inputs)(inputs, **options)


def one_token(
    log_ratio: float, advantage: float, reward: float | None = None, proximal: float = 0.0
) -> LossInputs:
    """A single token, float64: log π − log π_behavior and log π_proximal − log π_behavior, nats; advantage; reward.

    Without a reward it is the advantage.
    """
    behavior = torch.tensor([-2.0], dtype=torch.float64)
    rewards = torch.tensor([advantage if reward is None else reward], dtype=torch.float64)
    return LossInputs(
        logprobs=(behavior + log_ratio).requires_grad_(),
        behavior_logprobs=behavior,
        proximal_logprobs=behavior + proximal,
        advantages=torch.tensor([advantage], dtype=torch.float64),
        rewards=rewards,
        sequence_ids=torch.zeros(1, dtype=torch.int64),
    )


def select(inputs: LossInputs, chosen: Tensor) -> LossInputs:
    """The tokens `chosen` ([K] int64 or [N] bool) as a micro-batch of the update, their sequences numbered anew."""
    kept = {name: getattr(inputs, name)[chosen] for name in inputs.__dataclass_fields__}
    kept["sequence_ids"] = kept["sequence_ids"].unique(return_inverse=True)[1]
    return LossInputs(**kept)


def gradient(loss: Callable, inputs: LossInputs) -> Tensor:
    """d Σ loss / d logprobs, [N]."""
    return torch.autograd.grad(evaluate(loss, inputs)[0].sum(), inputs.logprobs)[0]


def check_values_and_gradients(loss: Callable, oracle: SequenceOracle, inputs: LossInputs) -> None:
    """Compare with the oracle token by token, and its gradient with central differences of the oracle."""
    loss = within(loss, inputs)
    losses, _ = loss(inputs)
    slopes = gradient(loss, inputs)
    step = 1e-6
    for ids in range(int(inputs.sequence_ids.max()) + 1):
        places = torch.nonzero(inputs.sequence_ids == ids).flatten().tolist()
        tokens = [_token(inputs, t) for t in places]
        for t, expected in zip(places, oracle(tokens), strict=True):
            assert math.isclose(losses[t].item(), expected, rel_tol=1e-12, abs_tol=1e-12)
        for i, t in enumerate(places):
            ends = []
            for move in (step, -step):
                moved = replace(tokens[i], logprob=tokens[i].logprob + move)
                ends.append(math.fsum(oracle([*tokens[:i], moved, *tokens[i + 1 :]])))
            expected = (ends[0] - ends[1]) / (2 * step)
            assert math.isclose(slopes[t].item(), expected, rel_tol=1e-6, abs_tol=1e-6)


def _token(inputs: LossInputs, t: int) -> Token:
    logprob = inputs.logprobs[t].item()
    return Token(
        logprob,
        logprob,
        inputs.behavior_logprobs[t].item(),
        inputs.proximal_logprobs[t].item(),
        inputs.advantages[t].item(),
        inputs.rewards[t].item(),
    )


def check_tokens_are_independent(loss: Callable, inputs: LossInputs) -> None:
    """The loss of a token is the same without the other tokens, and has no gradient to them."""
    loss = within(loss, inputs)
    losses, _ = loss(inputs)
    for t in (0, 17, len(losses) - 1):
        alone, _ = loss(select(inputs, torch.tensor([t])))
        assert alone.item() == losses[t].item()
        (slopes,) = torch.autograd.grad(losses[t], inputs.logprobs, retain_graph=True)
        assert set(torch.nonzero(slopes).flatten().tolist()) <= {t}


def check_sequences_are_independent(loss: Callable, inputs: LossInputs) -> None:
    """The losses of a sequence are the same without the other sequences, and have no gradient to them."""
    loss = within(loss, inputs)
    losses, _ = loss(inputs)
    for ids in inputs.sequence_ids.unique():
        mine = inputs.sequence_ids == ids
        alone, _ = loss(select(inputs, mine))
        torch.testing.assert_close(alone, losses[mine], rtol=1e-14, atol=0)
        (slopes,) = torch.autograd.grad(losses[mine].sum(), inputs.logprobs, retain_graph=True)
        assert not slopes[~mine].any()


def check_on_policy_gradient(loss: Callable, inputs: LossInputs) -> None:
    """Where current, proximal and behavior policy agree, the gradient is that of plain policy gradient: −A."""
    behavior = inputs.behavior_logprobs
    on_policy = replace(
        inputs, logprobs=behavior.clone().requires_grad_(), proximal_logprobs=behavior
    )
    torch.testing.assert_close(
        gradient(loss, on_policy), -inputs.advantages, rtol=1e-12, atol=1e-12
    )


def check_stats(stats: dict[str, Tensor], names: set[str], num_tokens: int) -> None:
    """Stats have these names, one finite detached number per token."""
    assert set(stats) == names
    for values in stats.values():
        assert (
            values.shape == (num_tokens,)
            and not values.requires_grad
            and torch.isfinite(values).all()
        )
