"""Which attention is chosen, and that each gives what single sequences give, in every family of models."""

import json
import sys

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
import transformers
from tiny_families import packed_scores, plain_scores, tiny_config, tiny_model
from tiny_policy import random_sequences, random_tree
from transformers import MistralConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import asyncrl.trainer.attention
from asyncrl.trainer.attention import (
    choose_attention,
    mixes_sequences,
    unfit_for_varlen,
)
from asyncrl.trainer.families import COMPARED, read_config
from asyncrl.trainer.logprobs import TokenLogprobs
from extras.trees.attention import unfit_for_sharing
from extras.trees.tree import bundle

pytestmark = pytest.mark.usefixtures("one_rank")
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
USUAL = ("gemma3_text", "gpt2", "llama", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Tried in every run beside the families that differ in packed rows or in their logits."""
SCALED = {"cohere2": {"logit_scale": 0.2}, "falcon_h1": {"lm_head_multiplier": 0.3}}


# By bounds: varlen_attn, with a dense kernel on the CPU


def test_no_mask_is_made_beside_the_bounds_of_sequences():
    """It would have the square of the row."""
    module, masks = TokenLogprobs(tiny_model(tiny_config("qwen3"), "varlen")), []
    module.model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, options: masks.append(options["attention_mask"]), with_kwargs=True
    )
    packed_scores(module, random_sequences(3), "one_row")
    assert masks == [None]


def test_scores_that_it_would_change_silently_are_refused():
    heads = torch.zeros(1, 2, 3, 8)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3}
    attend = asyncrl.trainer.attention.varlen_attention
    values = heads.bfloat16()  # beside queries and keys that a norm has made float32
    found = attend(None, heads, heads, values, None, **bounds, softcap=None)[0]
    assert found.shape == (1, 3, 2, 8) and found.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="does not know the model's softcap"):
        attend(None, heads, heads, heads, None, **bounds, softcap=50.0)


# Choice


@pytest.mark.parametrize(
    ("config", "capability", "flash_attn", "chosen", "line"),
    [
        (Qwen3Config(), HOPPER, None, "varlen", ""),
        (Qwen3Config(), HOPPER, torch, "flash_attention_2", ""),
        (Qwen3Config(), HOPPER, "of another torch", "varlen", "its import fails"),
        (transformers.GptOssConfig(), HOPPER, torch, "eager", ""),
        (Qwen3Config(), (7, 5), None, "sdpa", "the GPU has 7.5"),
        (Qwen3Config(head_dim=20), HOPPER, None, "sdpa", "they have 20"),
        (transformers.BloomConfig(), HOPPER, None, "eager", "a fixed attention for bloom"),
        (transformers.NemotronConfig(), HOPPER, None, "sdpa", "a fixed attention for nemotron"),
        (transformers.Gemma4TextConfig(), HOPPER, None, "sdpa", "they have 256, 512"),
    ],
)  # fmt: skip
def test_a_gpu_takes_flash_attn_where_it_works_else_varlen_or_else_a_mask_and_a_line_says_why(
    config, capability, flash_attn, chosen, line, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(asyncrl.trainer.attention, "is_flash_attn_2_available", lambda: flash_attn)
    is_broken = isinstance(flash_attn, str)
    monkeypatch.setitem(sys.modules, "flash_attn", None if is_broken else torch)
    assert choose_attention(torch.device("cuda"), config) == chosen
    assert line in capsys.readouterr().out
    assert choose_attention(torch.device("cpu"), Qwen3Config()) == "sdpa"


# Families


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in {*A_ROW_EACH, *SCALED, *USUAL} else pytest.mark.slow)
        for name in sorted({*COMPARED, *A_ROW_EACH})
    ],
)
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
    tree = bundle(random_tree(6, system=8, vocabulary=9), "tree")[0]
    shared = packed_scores(module, [tree], module.layout)
    can_share = torch.allclose(shared, plain_scores(module.model, tree.sequences), atol=1e-4)
    # the windows of many families are wider than these trees
    assert can_share != bool(unfit) or unfit == ["sliding_attention"]
    if unfit_for_varlen(config, HOPPER) is None and not changes:
        by_bounds = packed_scores(TokenLogprobs(tiny_model(config, "varlen")), sequences, "one_row")
        torch.testing.assert_close(by_bounds, alone, rtol=1e-4, atol=1e-4)


def test_a_family_that_was_not_compared_is_refused_in_one_line(tmp_path):
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert set(COMPARED) <= known
    for family in known - set(COMPARED):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        line = f"^--model {tmp_path} is a {family}, whose log-probs .+qwen3[^\\n]*$"
        with pytest.raises(ValueError, match=line):
            read_config(str(tmp_path))
    MistralConfig().save_pretrained(tmp_path)
    assert isinstance(read_config(str(tmp_path)), MistralConfig)
