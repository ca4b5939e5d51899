"""How each family of models is packed so that its sequences do not see each other, and which families are refused."""

from types import SimpleNamespace

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
from plain_trainer import PlainTrainer, check_step, randomize
from tiny_families import tiny_config, tiny_model
from tiny_policy import load, make_config, random_sequences, save_tiny_family
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrl.trainer import families
from asyncrl.trainer.attention import check_sharing, mixes_sequences, unfit_for_varlen
from asyncrl.trainer.families import COMPARED, read_config
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.packing import bundle, pack
from asyncrl.trainer.sampling import Sampling

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


@pytest.mark.parametrize("family", sorted({*COMPARED, *A_ROW_EACH}))
def test_a_sequence_has_a_row_of_its_own_exactly_if_it_would_change_another_in_a_packed_row(family):
    """By bounds too, where the model can be computed so; windows count from a token back there."""
    config = tiny_config(family)
    module = TokenLogprobs(tiny_model(config))
    sequences = random_sequences(4, seed=1)
    alone = torch.cat([scores(module, [sequence]) for sequence in sequences])
    changes = not torch.allclose(scores(module, sequences), alone, atol=1e-4)
    assert changes == mixes_sequences(config) == (family in A_ROW_EACH)
    if changes:
        why = f"full attention in every layer, m has {A_ROW_EACH[family]}; leave the option out$"
        with pytest.raises(ValueError, match=f"^--share-prefix needs {why}"):
            check_sharing(config, "m")
    in_layout = scores(module, sequences, module.layout)
    torch.testing.assert_close(in_layout, alone, rtol=1e-5, atol=1e-5)
    if unfit_for_varlen(config, HOPPER) is None and not changes:
        by_bounds = TokenLogprobs(tiny_model(config, "varlen"))
        torch.testing.assert_close(scores(by_bounds, sequences), alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def scores(module, sequences, layout="one_row") -> torch.Tensor:
    """Log-probs of the trained tokens, the sequences packed in this order."""
    batch = pack([one for sequence in sequences for one in bundle([sequence])], layout)
    return module(batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())[0]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("granite", {"logits_scaling": 3.0}),
        ("hyperclovax", {"logits_scaling": 0.3}),
        ("cohere2", {"logit_scale": 0.2}),
        ("falcon_h1", {"lm_head_multiplier": 0.3}),
        ("gemma3_text", {"final_logit_softcapping": 9.0}),
    ],
)
@torch.no_grad()
def test_logits_are_scaled_and_capped_as_the_family_does(family, options):
    model = tiny_model(tiny_config(family, **options))
    (sequence,) = random_sequences(1)
    tokens = torch.from_numpy(sequence.tokens)
    logprobs = model(tokens[None]).logits[0, :-1].log_softmax(dim=-1)
    expected = logprobs.gather(1, tokens[1:, None])[sequence.loss_mask[1:], 0]
    found = scores(TokenLogprobs(model), [sequence])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["falcon_h1", "gpt_oss", "lfm2", "qwen3_next"])
def test_a_step_in_rows_of_their_own_is_that_of_the_definition(family, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "COMPARED", (*COMPARED, family))
    policy = load(make_config(save_tiny_family(family, str(tmp_path))))
    randomize(policy)
    updates = [random_sequences(9)]
    expected = PlainTrainer(policy).train_step(updates, 11)
    # The one number of a head that gated delta rules have is a sum over all tokens, which rounds the most.
    check_step(policy, updates, 60, 11, expected, relative=2e-5)
    assert policy.module.layout == "row_each"


def test_a_family_that_was_not_compared_is_refused_in_one_line(monkeypatch):
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert set(COMPARED) <= known
    for family in known - set(COMPARED):
        config = SimpleNamespace(model_type=family)
        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, c=config, **__: c)
        line = f"^--model m is a {family}: vLLM computes other .+qwen3[^\\n]*$"
        with pytest.raises(ValueError, match=line):
            read_config("m", shares_prefix=False)
