"""What holds for every loss, with the options of losses.toml: its formula, and what the trainer needs of it."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import oracles
import pytest
import torch
from host_waits import HostWaits
from loss_inputs import CASES, FUNCTIONS, VARIANTS, evaluate, gradient, random_inputs, select

from algos import KL_ESTIMATORS, LossInputs
from algos.inputs import couples_tokens, joined
from algos.ratio import importance_ratio

AT_ONE = [(name, options) for name, case in CASES.items() for options in case.get("at_one", [])]

every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)


def oracle_rows(name, options, inputs):
    """Tokens of the inputs, and a function from tokens to their rows by the formula."""
    names = [name for name in inputs.__dataclass_fields__ if name != "columns"]
    columns = [getattr(inputs, key).tolist() for key in names]
    *numbers, sequence_ids, _ = columns  # no loss here reads lags
    tokens = [oracles.Token(row[0], *row) for row in zip(*numbers, strict=True)]
    if couples_tokens(FUNCTIONS[name]):
        options = options | {"update": tokens}

    def rows(tokens):
        sequences = defaultdict(list)
        for sequence_id, token in zip(sequence_ids, tokens, strict=True):
            sequences[sequence_id].append(token)
        formula = getattr(oracles, name)
        return [formula(token, s, **options) for s in sequences.values() for token in s]

    return tokens, rows


def check_rows(losses, stats, rows):
    """Losses and stats, one number per token, are those of the oracle, and the losses alone carry gradient."""
    found = {"loss": losses, **stats}
    assert set(found) == set(rows[0])
    for key, values in found.items():
        assert values.requires_grad == (key == "loss")
        expected = torch.tensor([row[key] for row in rows], dtype=torch.float64)
        torch.testing.assert_close(values.detach(), expected, rtol=1e-12, atol=1e-12)


@every_variant
@pytest.mark.parametrize("tokens_per_sequence", [1, 7])
def test_losses_gradients_and_stats_are_those_of_the_formula_and_the_host_waits_for_no_gpu(
    name, options, tokens_per_sequence
):
    """What a loss makes without `device=` is on another device here, as it would be beside inputs on a GPU."""
    inputs = random_inputs(70, spread=0.8, tokens_per_sequence=tokens_per_sequence)
    inputs = replace(inputs, advantages=inputs.advantages.roll(31))
    # Each token has a weight of its own, as only so the sum's gradient shows which loss it comes from.
    weights = torch.linspace(0.5, 1.5, 70, dtype=torch.float64)
    with torch.device("meta"), HostWaits() as waits:
        losses, stats = evaluate(FUNCTIONS[name], inputs, **options)
        slopes = gradient(weights * losses, inputs)
    assert not waits.names
    tokens, rows = oracle_rows(name, options, inputs)
    check_rows(losses, stats, rows(tokens))
    for place, (token, slope) in enumerate(zip(tokens, slopes.tolist(), strict=True)):
        sums = []
        for step in (1e-6, -1e-6):
            moved = replace(token, logprob=token.logprob + step)
            moved_rows = rows([*tokens[:place], moved, *tokens[place + 1 :]])
            pairs = zip(weights.tolist(), moved_rows, strict=True)
            sums.append(math.fsum(weight * row["loss"] for weight, row in pairs))
        expected = (sums[0] - sums[1]) / 2e-6
        assert math.isclose(slope, expected, rel_tol=1e-6, abs_tol=1e-6)


# Weights of two sides other than 1 are there to differ from it. gspo and gmpo spread the gradient over the sequence, so
# for them the advantages of a sequence must be equal.
@pytest.mark.parametrize(
    ("name", "options"),
    [*AT_ONE, *(v for v in VARIANTS if v[0] not in {"weighted_topr", *KL_ESTIMATORS})],
    ids=str,
)
@pytest.mark.parametrize("tokens_per_sequence", [1, 10])
def test_on_policy_every_loss_is_policy_gradient_also_with_bounds_at_the_ratio_1(
    name, options, tokens_per_sequence
):
    inputs = random_inputs(spread=0.0, tokens_per_sequence=tokens_per_sequence)
    losses, stats = evaluate(FUNCTIONS[name], inputs, **options)
    assert not stats.get("clipped", torch.zeros(1)).any()
    torch.testing.assert_close(gradient(losses, inputs), -inputs.advantages, rtol=1e-12, atol=1e-12)


@every_variant
def test_the_gradient_of_a_token_has_no_other_advantage_or_the_loss_refuses_advantages_per_token(
    name, options
):
    inputs = random_inputs()
    inputs = replace(inputs, advantages=torch.linspace(-1, 1, 60, dtype=torch.float64).roll(7))
    other_advantages = inputs.advantages.clone()
    other_advantages[1::2] *= -2
    changed = replace(inputs, advantages=other_advantages)
    slopes, changed_slopes = (
        gradient(evaluate(FUNCTIONS[name], tokens, update=inputs, **options)[0], tokens)
        for tokens in (inputs, changed)
    )
    assert torch.equal(slopes[::2], changed_slopes[::2]) == (name not in ("gspo", "gmpo"))
    refuses = getattr(FUNCTIONS[name], "needs_equal_advantages", False)
    assert refuses is (name in ("gspo", "gmpo", "opsm"))


@every_variant
def test_micro_batches_have_the_losses_of_the_update_that_they_are_joined_to(name, options):
    inputs = random_inputs()
    losses, _ = evaluate(FUNCTIONS[name], inputs, **options)
    splits = inputs.sequence_ids < 2, inputs.sequence_ids < 0, inputs.sequence_ids >= 2
    parts = [select(inputs, chosen) for chosen in splits]
    update = joined([part.to("cpu") for part in parts])
    assert torch.equal(update.sequence_ids, inputs.sequence_ids)
    assert not update.logprobs.requires_grad
    found = [evaluate(FUNCTIONS[name], part, update, **options)[0] for part in parts]
    torch.testing.assert_close(torch.cat(found), losses, rtol=1e-14, atol=0)


@every_variant
def test_extreme_log_ratios_give_finite_losses_gradients_and_stats(name, options):
    # All log-probs that are at most 90 nats apart, with every sign of advantage and reward; some of them sure (0).
    levels = itertools.product(
        (-90.0, -25.0, 0.0), (-90.0, -25.0, 0.0), (-90.0, 0.0), (-1.0, 0.0, 1.0), (0.0, 1.0)
    )
    if name in KL_ESTIMATORS:
        # which bound no ratio to the policy that sampled: no engine samples what is less likely
        levels = (row for row in levels if row[1] > -90)
    columns = torch.tensor(list(levels)).unbind(1)
    for dtype, tokens_per_sequence in itertools.product((torch.float32, torch.float64), (1, 5)):
        logprobs, *others = (column.to(dtype) for column in columns)
        sequence_ids = torch.arange(len(logprobs)) // tokens_per_sequence
        inputs = LossInputs(logprobs.clone().requires_grad_(), *others, sequence_ids)
        losses, stats = evaluate(FUNCTIONS[name], inputs, **options)
        for values in (losses, gradient(losses, inputs), *stats.values()):
            assert torch.isfinite(values).all() and values.dtype == dtype


def test_past_e_to_the_20_a_ratio_has_no_gradient():
    log_ratio = torch.tensor([-90.0, -19.0, 0.0, 19.0, 90.0], requires_grad=True)
    ratio = importance_ratio(log_ratio)
    ratio.sum().backward()
    assert ratio.detach().log().tolist() == pytest.approx([-20, -19, 0, 19, 20])
    assert (log_ratio.grad > 0).tolist() == [False, True, True, True, False]
