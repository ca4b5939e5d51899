"""Attention by bounds and by masks gives what single sequences give; and when which attention is chosen."""

import functools
import sys

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
import transformers
from tiny_families import packed_scores, plain_scores, tiny_config
from tiny_policy import random_tree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, Qwen3Config

import asyncrl.trainer.attention
from asyncrl.trainer.attention import (
    _block_mask_maker,
    attention_inputs,
    choose_attention,
    dense_mask,
    mask_function,
)
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.packing import bundle

pytestmark = pytest.mark.usefixtures("one_rank")
HOPPER = (9, 0)


# By masks: shared prefixes


# slower, but the same mask
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_has_the_scores_of_single_sequences_and_each_token_meets_the_head_once(
    untied,
):
    options = {"attn_implementation": "flex_attention"}
    module = TokenLogprobs(AutoModelForCausalLM.from_pretrained(untied, **options).eval())
    rows = []
    module.model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    bundles = bundle(random_tree(20, seed=5, system=0), "tree")
    in_order = [s for b in bundles for s in b.sequences]
    with torch.compiler.set_stance("force_eager"):
        logprobs = packed_scores(module, in_order, "one_row", "tree")
    expected = plain_scores(AutoModelForCausalLM.from_pretrained(untied).eval(), in_order)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    trained = {tuple(s.tokens[: t + 1]) for s in in_order for t in s.loss_mask.nonzero()[0]}
    assert module.layout == "one_row" and len(bundles) == 3
    assert sum(rows) == len(trained) < len(logprobs)


def test_the_mask_s_maker_is_compiled_once_for_all_widths(monkeypatch):
    """On a GPU. Here by dynamo alone, which makes the graphs that inductor would compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make = _block_mask_maker.__wrapped__("cuda")
    for width in (256, 1280):
        until = (torch.arange(width) // 50 * 50 + 50)[None]
        blocks = make(mask_function(until), 1, None, width, width, until.device).to_dense()[0, 0]
        tiles = dense_mask(until)[0, 0].unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        assert torch.equal(blocks, tiles.any(dim=3).any(dim=1).int())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# By bounds: varlen_attn, with a dense kernel on the CPU


class Largest(TorchDispatchMode):
    """Remembers the most entries of any tensor that an operation makes."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_iter(results)):
            num = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.entries = max(self.entries, num)
        return results


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_no_tensor_has_the_square_of_the_row(attention, monkeypatch):
    """Forward and backward, of meta tensors: 4096 columns of 192 entries are below 4096². Dense attention has it."""
    # Of values, which meta tensors have not, transformers asks whether more than one sequence is in the row.
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *_: True)
    with torch.device("meta"):
        config = tiny_config("llama")
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    positions = torch.arange(4096)[None] % 512
    with Largest() as largest:
        seen = attention_inputs(attention, positions, None)
        seen = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in seen.items()}
        positions = positions.to("meta")
        hidden = model.base_model(positions, position_ids=positions, use_cache=False, **seen)[0]
        hidden.sum().backward()
    assert (largest.entries >= 4096**2) == (attention == "sdpa")
    assert model.base_model.layers[0].self_attn.q_proj.weight.grad is not None


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


def choice(config=None, device="cuda"):
    return choose_attention(torch.device(device), config or Qwen3Config())


@pytest.mark.parametrize(
    ("flash_attn", "expected"), [(torch, "flash_attention_2"), (None, "varlen")]
)
def test_a_gpu_takes_flash_attn_where_it_works_and_else_varlen(
    flash_attn, expected, monkeypatch, capsys
):
    """A line says that the import of a flash-attn for another torch fails."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    assert choice() == "varlen" and choice(device="cpu") == "sdpa"
    monkeypatch.setattr(asyncrl.trainer.attention, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    assert choice() == expected
    assert choice(config=transformers.RecurrentGemmaConfig()) == "sdpa"
    assert choice(config=transformers.GptOssConfig()) == "eager"
    assert capsys.readouterr().out.count("its import fails") == (flash_attn is None)


@pytest.mark.parametrize(
    ("config", "capability", "reason"),
    [
        (Qwen3Config(), (7, 5), "the GPU has 7.5"),
        (Qwen3Config(head_dim=20), HOPPER, "they have 20"),
        (transformers.BloomConfig(), HOPPER, "lets nobody choose the attention of bloom"),
        (transformers.NemotronConfig(), HOPPER, "lets nobody choose the attention of nemotron"),
        (transformers.Gemma4TextConfig(), HOPPER, "they have 256, 512"),
    ],
)
def test_what_varlen_cannot_compute_takes_a_mask_and_a_line_says_why(
    config, capability, reason, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    by_mask = "eager" if isinstance(config, transformers.BloomConfig) else "sdpa"
    assert choice(config=config) == by_mask and reason in capsys.readouterr().out
