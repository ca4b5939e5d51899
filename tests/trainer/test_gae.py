"""What the steps of tests/trainer/test_policy.py, whose oracle estimates in a loop, do not show of values."""

from dataclasses import dataclass

import pytest
import torch

from asyncrl.config import AdvantageOptions
from asyncrl.trainer.gae import ValueHead, estimate_step


@dataclass(frozen=True)
class Batch:
    advantages: torch.Tensor
    columns: dict[str, torch.Tensor]
    sequence_ids: torch.Tensor


def batch_of(sequences):
    """A micro-batch of (reward, values) of each sequence."""
    lengths = torch.tensor([len(values) for _, values in sequences], dtype=torch.int64)
    rewards = torch.tensor([reward for reward, _ in sequences], dtype=torch.float32)
    values = torch.tensor([value for _, values in sequences for value in values])
    ids = torch.arange(len(sequences)).repeat_interleave(lengths)
    return Batch(rewards.repeat_interleave(lengths), {"values": values}, ids)


@pytest.mark.parametrize(
    ("sequences", "explained", "most"),
    [
        ([(r, [2.0] * 4) for r in (0.0, 1.0, 3.0)], {"value/explained_variance": 0.0}, 2.0),
        ([(1.0, [0.1, 0.2]), (1.0, [0.3])], {}, 2.0),
        ([(reward, [0.0]) for reward in (0.0, 1e-8, 3e-8)], {}, 0.1),
        ([(1e3 + 0.1, [0.0] * 7)] * 3, {}, 1e-5),
    ],
    ids=[
        "constant values",
        "equal returns",
        "returns that rounding tells apart",
        "equal advantages",
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_values_explain_nothing_of_returns_that_are_all_equal(sequences, explained, most):
    """Advantages are whitened, those that are equal to zero."""
    updates = [[batch_of(part)] for part in ([], sequences)]
    ((nothing,), (batch,)), metrics = estimate_step(updates, AdvantageOptions())
    assert metrics == pytest.approx(explained) and len(nothing.columns["returns"]) == 0
    assert batch.advantages.dtype == batch.columns["returns"].dtype == torch.float32
    assert batch.advantages.abs().max() < most


def test_the_backward_pass_of_the_head_keeps_no_float32_copy_of_hidden_states():
    head, kept = ValueHead(8).to_empty(device="cpu"), []
    torch.nn.init.ones_(head.weight)
    hidden = torch.ones(5, 8, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks:
        head(hidden).sum().backward()
    assert (torch.float32, hidden.shape) not in [(tensor.dtype, tensor.shape) for tensor in kept]
    assert torch.equal(hidden.grad, torch.ones_like(hidden))
    assert torch.equal(head.weight.grad, torch.full((8,), 5.0))
