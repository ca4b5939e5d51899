"""What --algo-args takes: the options of losses.toml, and values far from them."""

import inspect
import itertools
import math
import re

import oracles
import pytest
import torch
from loss_inputs import VARIANTS, evaluate, gradient, random_inputs

from algos import LOSSES
from algos.inputs import keywords_of
from asyncrl.config import Config
from asyncrl.trainer.loss_choice import choose_loss, reads_sequences, try_loss

EXTREMES = (
    "0", "1e-300", "1e-30", "1e-6", "0.5", "1", "1.0000001", "2", "1e6", "1e9", "1e30", "1e300", "-1",
)  # fmt: skip


def options_of(algo):
    return [options for name, options in VARIANTS if name == algo]


def as_items(options):
    """Options as the words of --algo-args."""
    return tuple(f"{name}={str(value).lower()}" for name, value in options.items())


def chosen(algo, *items):
    return choose_loss(Config(algo=algo, algo_args=items))


@pytest.mark.parametrize("algo", LOSSES)
def test_options_and_defaults_of_every_loss_are_read_and_none_is_left_untried(algo):
    """The formula in oracles.py has the same defaults."""
    defaults = {keyword.name: keyword.default for keyword in keywords_of(LOSSES[algo])}
    assert set().union(*options_of(algo)) == set(defaults)
    given = {name: default for name, default in defaults.items() if default is not None}
    formula = inspect.signature(getattr(oracles, algo)).parameters
    assert {name: formula[name].default for name in given} == given
    for options in [given, *options_of(algo)]:
        assert chosen(algo, *as_items(options)).keywords == options


RATIO_OF_SEQUENCES = ("cppo", "gmpo", "gspo", "minpro", "opsm", "pnpo", "sequence_is", "vespo")
LEVELS = ("sequence", "geometric")
"""Options of other losses with which they have a ratio for each sequence, too."""


@pytest.mark.parametrize("algo", LOSSES)
def test_a_loss_that_takes_ratios_of_sequences_is_known_by_what_it_does(algo):
    """Any other loss reads token by token, with any of its options."""
    for options in [*options_of(algo), {}]:
        found = reads_sequences(chosen(algo, *as_items(options)))
        assert found == (algo in RATIO_OF_SEQUENCES or options.get("level") in LEVELS), options


def test_an_argument_without_annotation_has_the_type_of_its_default(monkeypatch):
    monkeypatch.setitem(LOSSES, "own", lambda inputs, *, power=2, scale=1.0: None)
    assert chosen("own", "power=3", "scale=2").keywords == {"power": 3, "scale": 2.0}
    assert not math.isnan(chosen("own", "scale=1e300").keywords["scale"])
    with pytest.raises(ValueError, match=r"power of --algo own must be a whole number"):
        chosen("own", "power=2.5")


@pytest.mark.parametrize("algo", LOSSES)
def test_an_extreme_value_is_refused_or_trains(algo):
    keywords = keywords_of(LOSSES[algo])
    names = [keyword.name for keyword in keywords if not isinstance(keyword.default, str | bool)]
    # fresh tokens, those that rounding has moved, and stale ones
    inputs = [
        random_inputs(spread=spread, tokens_per_sequence=1, dtype=torch.float32)
        for spread in (0.0, 1e-5, 10.0)
    ]
    num_trained = 0
    for name, value, options in itertools.product(names, EXTREMES, options_of(algo)):
        try:
            loss = chosen(algo, *as_items(options | {name: value}))
            try_loss(loss)
        except ValueError as error:
            reason = r"must be (≥|>|above|token) |take other arguments$"
            assert "\n" not in str(error) and re.search(reason, str(error)), error
            continue
        for tokens in inputs:
            slopes = gradient(evaluate(loss, tokens)[0], tokens)
            assert torch.isfinite(slopes).all(), (name, value)
            assert slopes.any() or tokens is inputs[2], (name, value)
        num_trained += 1
    assert num_trained >= 3 * len(names)


def test_a_loss_without_a_finite_gradient_on_fresh_tokens_is_refused():
    def masked(inputs):
        return torch.where(inputs.logprobs == inputs.behavior_logprobs, 0.0, inputs.logprobs), {}

    with pytest.raises(ValueError, match=r"whose ratio is 1, have .+ nothing would be trained"):
        try_loss(masked)
    with pytest.raises(ValueError, match="nan"):
        try_loss(lambda inputs: (inputs.logprobs * math.nan, {}))
