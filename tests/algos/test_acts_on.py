"""What the docstring of every loss says in «Acts on», for the table of docs/staleness.md, is what the loss does."""

import functools
from dataclasses import replace

import pytest
import torch
from loss_inputs import evaluate, gradient, random_inputs

from algos import LOSSES
from algos.inputs import couples_tokens
from asyncrl.trainer.loss_choice import reads_sequences
from scripts.blocks import acts_on

WITHOUT_LATER_TOKENS = {"cppo": {"adaptive": False}}
"""Options with which a loss of the prefix does not read what follows: an adaptive budget is of the whole sequence."""

every_loss = pytest.mark.parametrize("algo", LOSSES)


def words(algo):
    """The ratios, levels and means of a loss, a set each."""
    return [
        set(text.replace(" and ", ", ").split(", ")) - {"none", "nothing"}
        for text in acts_on(LOSSES[algo])[:3]
    ]


def slopes_of(algo, inputs, **options):
    return gradient(evaluate(LOSSES[algo], inputs, **options)[0], inputs)


def stale_inputs():
    """Tokens far from the policy that sampled them, none with an advantage of 0."""
    inputs = random_inputs(200, spread=1.0)
    return replace(inputs, advantages=torch.where(inputs.sequence_ids % 2 == 0, 1.0, -1.5).double())


def with_another(inputs, name, places=slice(None)):
    """Inputs whose log-probs of one policy are others at some places."""
    values = getattr(inputs, name).detach().clone()
    values[places] -= torch.linspace(1, 9, len(values), dtype=values.dtype)[places]
    return replace(inputs, **{name: values.requires_grad_(name == "logprobs")})


@every_loss
def test_a_loss_reads_the_ratios_that_it_names(algo):
    inputs = stale_inputs()
    reads = {
        name: not torch.equal(
            slopes_of(algo, inputs), slopes_of(algo, with_another(inputs, f"{name}_logprobs"))
        )
        for name in ("behavior", "proximal")
    }
    ratios = {(True, True): {"B", "U"}, (True, False): {"E"}, (False, False): set()}
    assert words(algo)[0] == ratios[reads["behavior"], reads["proximal"]]


@every_loss
def test_a_loss_reads_the_tokens_that_it_names(algo):
    levels = words(algo)[1]
    assert levels and levels <= {"token", "sequence", "prefix", "update"}
    assert couples_tokens(LOSSES[algo]) == ("update" in levels)
    assert reads_sequences(functools.partial(LOSSES[algo])) == bool(levels & {"sequence", "prefix"})
    if levels & {"sequence", "prefix"}:
        inputs = stale_inputs()
        is_last = torch.ones(200, dtype=torch.bool)
        is_last[:-1] = inputs.sequence_ids[1:] != inputs.sequence_ids[:-1]
        options = WITHOUT_LATER_TOKENS.get(algo, {})
        slopes, changed = (
            slopes_of(algo, tokens, **options)[~is_last]
            for tokens in (inputs, with_another(inputs, "logprobs", is_last))
        )
        # rounding, because the sums of prefixes run over all sequences
        assert torch.allclose(slopes, changed, rtol=1e-12) == ("prefix" in levels)


@every_loss
def test_a_loss_acts_by_the_means_that_it_names(algo):
    """A shape has a second derivative. The clip of a shape cuts gradients, too, so masks are told apart without one."""
    means = words(algo)[2]
    inputs = stale_inputs()
    losses = evaluate(LOSSES[algo], inputs)[0]
    (slopes,) = torch.autograd.grad(losses.sum(), inputs.logprobs, create_graph=True)
    curvature = torch.zeros(1)
    if slopes.requires_grad:
        (curvature,) = torch.autograd.grad(slopes.sum(), inputs.logprobs)
    assert curvature.any() == ("shape" in means)
    if "shape" not in means:
        weights = -slopes.detach() / inputs.advantages
        assert (weights == 0).any() == ("mask" in means)
        assert (weights[weights != 0] != 1).any() == ("weight" in means)
    assert means <= {"mask", "weight", "shape"}
    assert bool(means) == (algo != "reinforce")
