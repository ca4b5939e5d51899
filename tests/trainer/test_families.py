"""How each family of models is packed so that its sequences do not see each other, and which families are refused."""

from types import SimpleNamespace

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
from tiny_families import packed_scores, plain_scores, tiny_config, tiny_model
from tiny_policy import random_sequences, random_tree
from transformers import MistralConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrl.trainer.attention import mixes_sequences, unfit_for_sharing, unfit_for_varlen
from asyncrl.trainer.families import COMPARED, read_config
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.packing import bundle

HOPPER = (9, 0)
GATED = ("granitemoehybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
A_ROW_EACH = {
    **{family: f"the mask of {family}" for family in ("biogpt", "falcon", "opt")},
    "gpt_oss": "sliding_attention",
    **dict.fromkeys(GATED, "linear_attention"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "conv"),
    "falcon_h1": "hybrid",
}
"""Families whose sequences would see each other in a packed row, and why; transformers calls every recurrent layer
linear_attention."""
SCALED = {"cohere2": {"logit_scale": 0.2}, "falcon_h1": {"lm_head_multiplier": 0.3}}


@pytest.mark.parametrize("family", sorted({*COMPARED, *A_ROW_EACH}))
def test_a_sequence_has_a_row_of_its_own_exactly_if_it_would_change_another_in_a_packed_row(family):
    """Logits are scaled and capped as the family does, in rows of both kinds. A tree can be read if no layer minds.

    By bounds too, where the model can be computed so; windows count from a token back there.
    """
    config = tiny_config(family, **SCALED.get(family, {}))
    module = TokenLogprobs(tiny_model(config))
    sequences = random_sequences(4, seed=1)
    alone = plain_scores(module.model, sequences)
    changes = not torch.allclose(packed_scores(module, sequences, "one_row"), alone, atol=1e-4)
    assert changes == mixes_sequences(config) == (family in A_ROW_EACH)
    in_layout = packed_scores(module, sequences, module.layout)
    torch.testing.assert_close(in_layout, alone, rtol=1e-5, atol=1e-5)
    unfit = unfit_for_sharing(config)
    assert not changes or unfit == [A_ROW_EACH[family]]
    tree = bundle(random_tree(6, system=8, vocabulary=9), "tree")[0].sequences
    shared = packed_scores(module, tree, module.layout, "tree")
    can_share = torch.allclose(shared, plain_scores(module.model, tree), atol=1e-4)
    # the windows of many families are wider than these trees
    assert can_share != bool(unfit) or unfit == ["sliding_attention"]
    if unfit_for_varlen(config, HOPPER) is None and not changes:
        by_bounds = packed_scores(TokenLogprobs(tiny_model(config, "varlen")), sequences, "one_row")
        torch.testing.assert_close(by_bounds, alone, rtol=1e-4, atol=1e-4)


def test_a_family_that_was_not_compared_or_that_cannot_share_as_it_must_is_refused_in_one_line(
    monkeypatch,
):
    def read(config, sharing):
        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: config)
        return read_config("m", sharing)

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert set(COMPARED) <= known
    for family in known - set(COMPARED):
        line = f"^--model m is a {family}: vLLM computes other .+qwen3[^\\n]*$"
        with pytest.raises(ValueError, match=line):
            read(SimpleNamespace(model_type=family), "off")
    config = MistralConfig(sliding_window=64)
    assert read(config, "auto") == config
    line = "^--share-prefix needs full attention in every layer, m has sliding_window 64; leave the opt"
    with pytest.raises(ValueError, match=line):
        read(config, "tree")
