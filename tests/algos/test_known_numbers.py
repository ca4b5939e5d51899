"""Numbers that others published, of losses and of the functions beside them: known_numbers.toml."""

import pkgutil
import tomllib
from pathlib import Path

import pytest
import torch
from loss_inputs import evaluate, gradient

from algos import LOSSES, LossInputs

KNOWN = tomllib.loads((Path(__file__).parent / "known_numbers.toml").read_text())


def column(values):
    """A tensor of a list, floats in float64; anything else as it is."""
    if not isinstance(values, list):
        return values
    return torch.tensor(
        values, dtype=torch.float64 if isinstance(values[0], float) else torch.int64
    )


@pytest.mark.parametrize("case", KNOWN["loss"], ids=lambda case: case["name"])
def test_a_loss_has_the_numbers_of_its_source(case):
    num_tokens = len(case["logprobs"])
    lengths = torch.tensor(case.get("sequences", [num_tokens]))
    inputs = LossInputs(
        logprobs=column(case["logprobs"]).requires_grad_(),
        behavior_logprobs=column(case.get("behavior_logprobs", [0.0] * num_tokens)),
        proximal_logprobs=column(case.get("proximal_logprobs", case["logprobs"])),
        advantages=column(case.get("advantages", [1.0] * num_tokens)),
        rewards=torch.ones(num_tokens),
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(lengths),
    )
    losses, stats = evaluate(LOSSES[case["name"]], inputs, **case.get("options", {}))
    weighted = column(case.get("token_weights", [1.0] * num_tokens)) * losses
    slopes = gradient(weighted, inputs)
    found = {"losses": losses, "total": weighted.sum(), "slopes": slopes, **stats}
    for name, numbers in case["expected"].items():
        tolerance = case.get("tolerance", 1e-5)
        assert found[name].tolist() == pytest.approx(numbers, abs=tolerance), case["source"]


@pytest.mark.parametrize("case", KNOWN["call"], ids=lambda case: case["function"])
def test_a_function_has_the_numbers_of_its_source(case):
    function = pkgutil.resolve_name(case["function"])
    result = function(**{name: column(value) for name, value in case["arguments"].items()})
    numbers = result.tolist() if isinstance(result, torch.Tensor) else result
    assert numbers == pytest.approx(case["expected"], abs=1e-5)
