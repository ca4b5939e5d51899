"""How each family of models is packed so that its sequences do not see each other, and which families are refused."""

from types import SimpleNamespace

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
from plain_trainer import check_step, randomize
from tiny_families import packed_scores, plain_scores, tiny_config, tiny_model
from tiny_policy import load, make_config, random_sequences, save_tiny_family
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrl.trainer import families
from asyncrl.trainer.attention import mixes_sequences, unfit_for_sharing, unfit_for_varlen
from asyncrl.trainer.families import COMPARED, read_config
from asyncrl.trainer.logprobs import TokenLogprobs

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
    """Logits are scaled and capped as the family does, in rows of both kinds.

    By bounds too, where the model can be computed so; windows count from a token back there.
    """
    config = tiny_config(family, **SCALED.get(family, {}))
    module = TokenLogprobs(tiny_model(config))
    sequences = random_sequences(4, seed=1)
    alone = plain_scores(module.model, sequences)
    changes = not torch.allclose(packed_scores(module, sequences, "one_row"), alone, atol=1e-4)
    assert changes == mixes_sequences(config) == (family in A_ROW_EACH)
    if changes:
        assert unfit_for_sharing(config) == [A_ROW_EACH[family]]
    in_layout = packed_scores(module, sequences, module.layout)
    torch.testing.assert_close(in_layout, alone, rtol=1e-5, atol=1e-5)
    if unfit_for_varlen(config, HOPPER) is None and not changes:
        by_bounds = packed_scores(TokenLogprobs(tiny_model(config, "varlen")), sequences, "one_row")
        torch.testing.assert_close(by_bounds, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["falcon_h1", "gpt_oss", "lfm2", "qwen3_next"])
def test_a_step_in_rows_of_their_own_is_that_of_the_definition(family, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "COMPARED", (*COMPARED, family))
    path = save_tiny_family(family, str(tmp_path))
    policy = load(make_config(path, share_prefix="auto"))
    randomize(policy)
    # The one number of a head that gated delta rules have is a sum over all tokens, which rounds the most.
    check_step(policy, [random_sequences(9)], 60, 11, relative=2e-5)
    assert policy.module.layout == "row_each" and not policy.module.can_share
    needs = "--share-prefix needs full attention in every layer"
    with pytest.raises(ValueError, match=f"^{needs}, .+ has {A_ROW_EACH[family]}; leave the opt"):
        load(make_config(path, share_prefix="tree"))


def test_a_family_that_was_not_compared_is_refused_in_one_line(monkeypatch):
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert set(COMPARED) <= known
    for family in known - set(COMPARED):
        config = SimpleNamespace(model_type=family)
        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, c=config, **__: c)
        line = f"^--model m is a {family}: vLLM computes other .+qwen3[^\\n]*$"
        with pytest.raises(ValueError, match=line):
            read_config("m", "off")
