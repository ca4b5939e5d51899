"""Options and random inputs of losses, with the penalties of KL_ESTIMATORS among them, and how a test calls a loss."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from algos import KL_ESTIMATORS, LOSSES, LossInputs
from algos.inputs import couples_tokens


def as_loss(estimator: Callable) -> Callable:
    """Return a penalty as a loss, whose reference is the proximal policy."""

    def loss(inputs: LossInputs):
        others = inputs.proximal_logprobs, inputs.behavior_logprobs
        return estimator(inputs.logprobs, *others), {}

    return loss


FUNCTIONS = LOSSES | {name: as_loss(estimator) for name, estimator in KL_ESTIMATORS.items()}
CASES = tomllib.loads((Path(__file__).parent / "losses.toml").read_text())
VARIANTS = [
    (name, options)
    for name in FUNCTIONS
    for options in [{}, *CASES.get(name, {}).get("options", [])]
]
"""The name of a loss, and its options."""


def random_inputs(
    num_tokens: int = 60,
    spread: float = 0.5,
    tokens_per_sequence: int = 10,
    dtype: torch.dtype = torch.float64,
):
    """Return LossInputs; `spread` is the std of the log-ratios, nats. Some advantages and rewards are 0."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=dtype)

    behavior = -normal().abs() - 1.0
    sequence_ids = torch.arange(num_tokens) // tokens_per_sequence
    return LossInputs(
        logprobs=(behavior + spread * normal()).clamp(max=-0.05).requires_grad_(),
        behavior_logprobs=behavior,
        proximal_logprobs=behavior + spread * normal(),
        advantages=torch.nn.functional.hardshrink(normal(), 0.2)[sequence_ids],
        rewards=normal().round()[sequence_ids],
        sequence_ids=sequence_ids,
    )


def evaluate(loss: Callable, inputs: LossInputs, update: LossInputs | None = None, **options):
    """Return loss and stats of a micro-batch; without `update` it is a whole update."""
    whole = [(update or inputs).to("cpu")] if couples_tokens(loss) else []
    return loss(inputs, *whole, **options)


def gradient(losses: Tensor, inputs: LossInputs) -> Tensor:
    """Return d Σ losses / d logprobs, [N]."""
    return torch.autograd.grad(losses.sum(), inputs.logprobs, retain_graph=True)[0]


def select(inputs: LossInputs, chosen: Tensor) -> LossInputs:
    """Return the tokens `chosen`, [N] bool, as a micro-batch of their own."""
    names = [name for name in inputs.__dataclass_fields__ if name != "columns"]
    columns = {name: getattr(inputs, name)[chosen] for name in names}
    columns["sequence_ids"] = columns["sequence_ids"].unique(return_inverse=True)[1]
    return LossInputs(**columns)
