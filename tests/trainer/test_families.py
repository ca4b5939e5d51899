"""Which models keep the sequences of a packed row apart, and which are refused, of all that transformers knows."""

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
from tiny_families import tiny_config, tiny_model
from tiny_policy import random_sequences
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrl.trainer.attention import check_layers, unfit_for_varlen
from asyncrl.trainer.families import COMPARED, check_family
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.packing import bundle, pack
from asyncrl.trainer.sampling import Sampling

HOPPER = (9, 0)
REFUSED = {
    **dict.fromkeys(("biogpt", "falcon", "opt"), "whose mask sees no bounds"),
    **dict.fromkeys(("granitemoehybrid", "qwen3_5_text"), "m has linear_attention layers"), "lfm2": "m has conv layers",
}  # fmt: skip
"""For what; transformers calls every recurrent layer linear_attention."""
NOT_BY_BOUNDS = ("gemma4_text", "gemma4_unified_text", "nemotron")
"""Families whose attention by bounds raises: they have several head sizes, or transformers gives them no bounds."""


@pytest.mark.parametrize("family", [*COMPARED, *REFUSED])
def test_a_model_is_refused_exactly_if_a_sequence_of_a_packed_row_changes_another(family):
    """By bounds too, where the model can be computed so; windows count from a token back there."""
    config = tiny_config(family)
    module = TokenLogprobs(tiny_model(config))
    sequences = random_sequences(4, seed=1)
    alone = torch.cat([scores(module, [sequence]) for sequence in sequences])
    changes = not torch.allclose(scores(module, sequences), alone, atol=1e-4)
    assert changes == (family in REFUSED)
    if not changes:
        check_layers(config, "m", shares_prefix=False)
        if family not in NOT_BY_BOUNDS and unfit_for_varlen(config, HOPPER) is None:
            by_bounds = TokenLogprobs(tiny_model(config, "varlen"))
            torch.testing.assert_close(scores(by_bounds, sequences), alone, rtol=1e-4, atol=1e-4)
        return
    for shares_prefix in (False, True):
        why = f"^--model .*{REFUSED[family]}; sequences of a packed row would see each other: take a model with"
        with pytest.raises(ValueError, match=why):
            check_layers(config, "m", shares_prefix)


@torch.no_grad()
def scores(module, sequences) -> torch.Tensor:
    """Log-probs of the trained tokens, the sequences packed into one row in this order."""
    batch = pack([one for sequence in sequences for one in bundle([sequence])], one_row=True)
    return module(batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())[0]


@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - set(COMPARED)))
def test_a_family_that_was_not_compared_is_refused_in_one_line(family):
    class Config:
        model_type = family

    with pytest.raises(
        ValueError, match=f"^--model m is a {family}: vLLM computes other .+qwen3"
    ) as caught:
        check_family(Config(), "m")
    assert "\n" not in str(caught.value)


def test_every_family_that_was_compared_is_known_to_transformers():
    assert set(COMPARED) <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
