"""What holds for every loss. Each has a file of its own beside this one for its formula and its boundaries."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from loss_checks import (
    check_on_policy_gradient,
    check_sequences_are_independent,
    check_tokens_are_independent,
    evaluate,
    gradient,
    random_inputs,
    select,
    within,
)

from algos import LOSSES, LossInputs
from algos.sequence_mean import sequence_mean

VARIANTS = {
    **LOSSES,
    "grpo-dual_clip": functools.partial(LOSSES["grpo"], dual_clip=3.0),
    "decoupled_ppo-truncate": functools.partial(LOSSES["decoupled_ppo"], action="truncate"),
    "cispo-unified_mask": functools.partial(LOSSES["cispo"], unified_mask=True),
    "icepop-sequence": functools.partial(LOSSES["icepop"], level="sequence"),
    "dppo-kl": functools.partial(LOSSES["dppo"], divergence="kl"),
    "mis-sequence": functools.partial(LOSSES["mis"], level="sequence"),
    "mis-geometric": functools.partial(LOSSES["mis"], level="geometric"),
    "tis_ppo-sequence": functools.partial(LOSSES["tis_ppo"], level="sequence"),
    "sequence_is-cap": functools.partial(LOSSES["sequence_is"], cap=2.0),
}
"""Every loss, and every option of one that is another formula. What is said of tokens and sequences is said of one
update: a loss that couples all of its tokens sees the same one in each micro-batch."""
SEQUENCE_LEVEL = (
    "gspo", "icepop-sequence", "opsm", "mis-sequence", "mis-geometric", "tis_ppo-sequence", "gmpo", "vespo",
    "sequence_is", "sequence_is-cap",
)  # fmt: skip
TOKEN_LEVEL = tuple(name for name in VARIANTS if name not in SEQUENCE_LEVEL)


# With the default options there is no exception. Three can be made to differ: weighted_topr, by other weights, which is
# what they are for (its own test); gspo and gmpo, whose gradient is spread over the sequence, by advantages that differ
# between the tokens of one sequence, which are refused (the next test), or weights that do, which no aggregation gives.
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tokens_per_sequence", [1, 10])
def test_on_policy_every_loss_is_policy_gradient(name, tokens_per_sequence):
    check_on_policy_gradient(VARIANTS[name], random_inputs(tokens_per_sequence=tokens_per_sequence))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_of_a_token_has_no_other_token_s_advantage_or_the_loss_refuses_advantages_per_token(
    name,
):
    inputs = random_inputs()
    inputs = replace(inputs, advantages=torch.linspace(-1, 1, 60, dtype=torch.float64).roll(7))
    others = inputs.advantages.clone()
    others[1::2] *= -2
    loss = within(VARIANTS[name], inputs)
    changed = gradient(loss, replace(inputs, advantages=others))[::2]
    is_its_own = torch.equal(changed, gradient(loss, inputs)[::2])
    assert is_its_own == (name not in ("gspo", "gmpo"))
    assert hasattr(LOSSES[name.partition("-")[0]], "needs_equal_advantages") == (
        name in ("gspo", "gmpo", "opsm")
    )


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_no_token_depends_on_another(name):
    check_tokens_are_independent(VARIANTS[name], random_inputs())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tokens_per_sequence", [1, 7])
def test_no_sequence_depends_on_another(name, tokens_per_sequence):
    check_sequences_are_independent(
        VARIANTS[name], random_inputs(tokens_per_sequence=tokens_per_sequence)
    )


@pytest.mark.parametrize("name", SEQUENCE_LEVEL)
def test_a_sequence_level_loss_on_sequences_of_one_token_is_a_token_level_loss(name):
    check_tokens_are_independent(VARIANTS[name], random_inputs(tokens_per_sequence=1))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_of_sequences_changes_nothing(name):
    inputs = random_inputs()
    order = torch.arange(60).reshape(6, 10).flip(0).flatten()
    turned = replace(select(inputs, order), sequence_ids=inputs.sequence_ids)
    losses, stats = evaluate(VARIANTS[name], inputs)
    turned_losses, turned_stats = evaluate(VARIANTS[name], turned)
    torch.testing.assert_close(turned_losses, losses[order], rtol=1e-14, atol=0)
    for key, values in stats.items():
        torch.testing.assert_close(turned_stats[key], values[order], rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_without_advantage_there_is_no_loss_and_no_gradient_but_kimi_s_pull(name):
    inputs = replace(random_inputs(spread=2.0), advantages=torch.zeros(60, dtype=torch.float64))
    losses, stats = evaluate(VARIANTS[name], inputs)
    slopes = gradient(VARIANTS[name], inputs)
    if name == "kimi":
        log_ratio = (inputs.logprobs - inputs.behavior_logprobs).detach()
        torch.testing.assert_close(slopes, 0.1 * log_ratio)
    else:
        assert not losses.any() and not slopes.any()
    assert all(torch.isfinite(values).all() for values in stats.values())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_of_the_inputs_is_that_of_the_loss_and_its_stats(name, dtype):
    inputs = convert(random_inputs(), dtype)
    losses, stats = evaluate(VARIANTS[name], inputs)
    assert losses.shape == (60,) and losses.dtype == dtype
    assert {values.dtype for values in stats.values()} == {dtype}


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_agrees_with_float64(name):
    inputs = random_inputs(spread=1.0)
    narrow = convert(inputs, torch.float32)
    narrow_losses, _ = evaluate(VARIANTS[name], narrow)
    losses, _ = evaluate(VARIANTS[name], inputs)
    torch.testing.assert_close(narrow_losses.double(), losses, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        gradient(VARIANTS[name], narrow).double(),
        gradient(VARIANTS[name], inputs),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens_per_sequence", [1, 5])
def test_extreme_log_ratios_give_finite_losses_gradients_and_stats(
    name, dtype, tokens_per_sequence
):
    # All log-probs that are at most 90 nats apart, with every sign of advantage and reward; some of them sure (0).
    levels = itertools.product(
        (-90.0, -25.0, 0.0), (-90.0, -25.0, 0.0), (-90.0, 0.0), (-1.0, 0.0, 1.0), (0.0, 1.0)
    )
    columns = [torch.tensor(column, dtype=dtype) for column in zip(*levels, strict=True)]
    sequence_ids = torch.arange(len(columns[0])) // tokens_per_sequence
    inputs = LossInputs(columns[0].requires_grad_(), *columns[1:], sequence_ids)
    losses, stats = evaluate(VARIANTS[name], inputs)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient(VARIANTS[name], inputs)).all()
    assert all(torch.isfinite(values).all() for values in stats.values())


def test_the_mean_over_a_sequence_is_that_of_a_loop_and_carries_gradient():
    values = torch.tensor([1.0, 2.0, 6.0, 5.0], dtype=torch.float64, requires_grad=True)
    means = sequence_mean(values, torch.tensor([0, 0, 0, 1]))
    assert means.tolist() == [3.0, 3.0, 3.0, 5.0]
    (slopes,) = torch.autograd.grad(means[0], values)
    assert slopes.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


def convert(inputs, dtype):
    columns = {name: getattr(inputs, name).detach() for name in inputs.__dataclass_fields__}
    columns = {
        name: column.to(dtype) if column.is_floating_point() else column
        for name, column in columns.items()
    }
    columns["logprobs"].requires_grad_()
    return LossInputs(**columns)
