"""Attention by bounds and by masks gives what single sequences give; and when which attention is chosen."""

import functools
import sys

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
import transformers
from plain_trainer import PlainTrainer, check_step, randomize
from tiny_policy import (
    VOCAB,
    load,
    make_config,
    random_sequences,
    random_tree,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

import asyncrl.trainer.attention
import asyncrl.trainer.logprobs
import asyncrl.trainer.model
from asyncrl.trainer.attention import (
    _block_mask_maker,
    attention_inputs,
    choose_attention,
    dense_mask,
    mask_function,
    unfit_for_sharing,
)
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.packing import bundle, pack
from asyncrl.trainer.sampling import Sampling

pytestmark = pytest.mark.usefixtures("one_rank")
HOPPER = (9, 0)


# By masks: shared prefixes


# slower, but the same mask
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@torch.no_grad()
def test_a_tree_has_the_scores_of_single_sequences_and_each_of_its_tokens_meets_the_head_once(
    untied, attention
):
    inner = AutoModelForCausalLM.from_pretrained(untied, attn_implementation=attention).eval()
    module, rows = TokenLogprobs(inner), []
    inner.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    bundles = bundle(random_tree(20, seed=5, system=0), "tree")
    batch = pack(bundles, module.layout)
    assert len(bundles) == 3 and (len(batch.input_ids) == 1) == (attention != "sdpa")
    inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())
    with torch.compiler.set_stance("force_eager"):
        logprobs, entropies, _ = module(*inputs, visible_until=batch.visible_until)
    in_order = [s for b in bundles for s in b.sequences]
    expected = PlainTrainer(load(make_config(untied))).read(in_order)
    torch.testing.assert_close(logprobs, expected[0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, expected[1].float(), rtol=1e-5, atol=1e-5)
    trained = {tuple(s.tokens[: t + 1]) for s in in_order for t in s.loss_mask.nonzero()[0]}
    assert sum(rows) == len(trained) < len(batch.targets)


def test_the_mask_s_maker_is_compiled_once_for_all_widths(monkeypatch):
    """On a GPU. Here by dynamo alone, which makes the graphs that inductor would compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make = _block_mask_maker.__wrapped__("cuda")
    for width in (256, 384, 1280):
        until = (torch.arange(width) // 50 * 50 + 50)[None]
        blocks = make(mask_function(until), 1, None, width, width, until.device).to_dense()[0, 0]
        tiles = dense_mask(until)[0, 0].unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        assert torch.equal(blocks, tiles.any(dim=3).any(dim=1).int())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_model_whose_window_counts_columns_of_the_row_shares_no_prefix():
    for config in (Qwen3Config(num_hidden_layers=2), LlamaConfig()):
        assert not unfit_for_sharing(config)
    assert unfit_for_sharing(MistralConfig(sliding_window=64)) == ["sliding_window 64"]


# By bounds: varlen_attn, with a dense kernel on the CPU


@pytest.mark.parametrize(
    "options", [{"save_memory": ("activations",)}, {"lora_rank": 4, "kl_coef": 0.1}]
)
@pytest.mark.parametrize("budget", [30, 100_000])
def test_a_step_is_that_of_the_definition(untied, budget, options, monkeypatch):
    """Also of micro-batches that share prefixes, and are computed by a mask, between others by bounds."""
    monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: "varlen")
    policy = load(make_config(untied, share_prefix="tree", **options))
    randomize(policy)
    policy.module.attention_of_trees = "sdpa"
    used = []
    monkeypatch.setattr(
        asyncrl.trainer.logprobs,
        "attention_inputs",
        lambda name, *tensors: used.append(name) or attention_inputs(name, *tensors),
    )
    check_step(policy, [random_tree(6), random_sequences(9)], budget, 11)
    assert "sdpa" in used


class Largest(TorchDispatchMode):
    """Remembers the most entries of any tensor that an operation makes."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_iter(results)):
            num = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.entries = max(self.entries, num)
        return results


@pytest.mark.parametrize(
    ("attention", "shares"), [("varlen", False), ("sdpa", False), ("sdpa", True)]
)
def test_no_tensor_has_the_square_of_the_row(attention, shares, monkeypatch):
    """Forward and backward, of meta tensors: 4096 columns of 32 entries are far below 4096². Dense attention has it."""
    # Of values, which meta tensors have not, transformers asks whether more than one sequence is in the row.
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *_: True)
    length = 4096
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    positions = torch.arange(length)[None] % 512
    until = (torch.arange(length)[None] // 512 + 1) * 512
    with Largest() as largest:
        seen = attention_inputs(attention, positions, until if shares else None)
        seen = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in seen.items()}
        inputs = torch.zeros(1, length, dtype=torch.int64, device="meta")
        hidden = model.base_model(
            inputs, position_ids=positions.to("meta"), use_cache=False, **seen
        )[0]
        hidden.sum().backward()
    assert (largest.entries >= length**2) == (attention == "sdpa")
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
    assert choice(config=RecurrentGemmaConfig()) == "sdpa"
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
