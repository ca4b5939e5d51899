"""torch's varlen_attn, with a dense kernel on the CPU, gives what single sequences give; and when it is chosen."""

import copy
import sys
from dataclasses import dataclass

import dense_varlen
import pytest
import torch
import transformers
from test_policy import make_config, plain_gradient
from tiny_policy import (
    VOCAB,
    assert_same_gradient,
    first_gradient,
    load,
    random_sequences,
    save_tiny_model,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, Qwen3Config

import asyncrl.trainer.attention
from asyncrl.trainer.attention import attention_inputs, choose_attention, unfit_for_varlen
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.packing import bundle, pack

pytestmark = pytest.mark.usefixtures("one_rank")
HOPPER = (9, 0)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
FAMILIES = {
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral with a window": transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "gemma3 with windows": transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "phi3": transformers.Phi3Config(**SIZES),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture
def by_varlen(monkeypatch):
    """The trainer of this process computes with varlen_attn; gives the dtypes and windows that its kernel is given."""
    given, plain = [], asyncrl.trainer.attention.varlen_attn
    monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: "varlen")

    def recorded(query, key, value, *rest, **options):
        given.append(({x.dtype for x in (query, key, value)}, options["window_size"]))
        return plain(query, key, value, *rest, **options)

    monkeypatch.setattr(asyncrl.trainer.attention, "varlen_attn", recorded)
    return given


@pytest.mark.parametrize("seed", range(5))
def test_its_bounds_and_window_say_what_the_dense_mask_says(seed):
    batch = pack(bundle(random_sequences(7, seed)), one_row=True)
    starts = (
        torch.where(batch.position_ids == 0, torch.arange(batch.position_ids.shape[1]), 0)
        .cummax(dim=1)
        .values
    )
    same = starts[:, :, None] == starts[:, None]
    seen = attention_inputs("varlen", batch.position_ids, batch.visible_until)
    assert torch.equal(dense_varlen.visible(seen["cu_seq_lens_q"], [-1, 0]), same[0].tril())


@pytest.mark.parametrize(
    "options", [{}, {"save_memory": ("activations",)}, {"save_memory": ("optimizer",)}]
)
@pytest.mark.parametrize("budget", [30, 100_000])
def test_the_gradient_is_that_of_the_definition(model, by_varlen, budget, options):
    """Tolerance, in float32: 1e-4 of the loss, 1e-5 of each parameter's largest gradient."""
    sequences = random_sequences(9)
    policy = load(make_config(model, **options))
    metrics = policy.train_step(distribute([sequences], 1, budget)[0], policy_version=12)
    loss, gradient = plain_gradient(
        model, sequences, "token_mean", policy.config.max_response_tokens
    )
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same_gradient(first_gradient(policy), gradient)
    assert by_varlen and all(call == ({torch.float32}, (-1, 0)) for call in by_varlen)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}])
def test_in_bfloat16_its_kernel_is_given_nothing_else(model, by_varlen, options):
    policy = load(make_config(model, dtype="bfloat16", **options))
    policy.train_step(distribute([random_sequences(9)], 1, 1000)[0], policy_version=12)
    assert by_varlen and all(call == ({torch.bfloat16}, (-1, 0)) for call in by_varlen)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_packed_row_gives_every_family_the_hidden_states_of_single_sequences(family, by_varlen):
    """Windows too, which count from a token back: 5 of them see the token itself and 4 others."""
    torch.manual_seed(0)
    assert unfit_for_varlen(FAMILIES[family], HOPPER) is None
    packed, alone = (
        AutoModelForCausalLM.from_config(
            copy.deepcopy(FAMILIES[family]), attn_implementation=name
        ).eval()
        for name in ("varlen", "eager")
    )
    alone.load_state_dict(packed.state_dict())
    sequences = random_sequences(5)
    batch = pack(bundle(sequences), one_row=True)
    seen = attention_inputs("varlen", batch.position_ids, None)
    hidden = packed.base_model(
        batch.input_ids, position_ids=batch.position_ids, use_cache=False, **seen
    )[0]
    expected = [
        alone.base_model(torch.from_numpy(s.tokens)[None], use_cache=False)[0][0] for s in sequences
    ]
    starts = (batch.position_ids[0] == 0).nonzero().flatten().tolist()
    lengths = torch.tensor([*starts, batch.input_ids.shape[1]]).diff().tolist()
    pairs = zip(batch.input_ids[0].split(lengths), hidden[0].split(lengths), strict=True)
    states_of = {tuple(ids.tolist()): states for ids, states in pairs}
    for sequence, states in zip(sequences, expected, strict=True):
        torch.testing.assert_close(states_of[tuple(sequence.tokens)], states, rtol=1e-4, atol=1e-4)
    assert by_varlen and ((4, 0) in {window for _, window in by_varlen}) == ("window" in family)


@dataclass
class Largest(TorchDispatchMode):
    """Remembers the most entries of any tensor that an operation makes."""

    entries: int = 0

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() // x.element_size()
            for x in tree_iter(results)
            if torch.is_tensor(x)
        ]
        self.entries = max([self.entries, *sizes])
        return results


@pytest.mark.parametrize(
    ("attention", "shares"), [("varlen", False), ("sdpa", False), ("sdpa", True)]
)
def test_no_tensor_has_the_square_of_the_row(attention, shares, monkeypatch):
    """Forward and backward, of meta tensors: 4096 columns of 32 entries are far below 4096². Dense attention has it."""
    # Of values, which meta tensors have not, transformers asks whether more than one sequence is in the row.
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *_: True)
    length = 4096
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SIZES), attn_implementation=attention
        )
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


# Choice


def test_a_gpu_takes_varlen_unless_prompts_are_shared_or_flash_attn_is_there(monkeypatch):
    config = Qwen3Config()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    assert choose_attention(torch.device("cuda"), config, shares_prefix=True) == "flex_attention"
    assert choose_attention(torch.device("cuda"), config, shares_prefix=False) == "varlen"
    monkeypatch.setattr(asyncrl.trainer.attention, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", torch)
    assert (
        choose_attention(torch.device("cuda"), config, shares_prefix=False) == "flash_attention_2"
    )
    assert {choose_attention(torch.device("cpu"), config, share) for share in (True, False)} == {
        "sdpa"
    }


def test_a_flash_attn_of_another_torch_is_told_in_a_line_and_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setattr(asyncrl.trainer.attention, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # its import fails
    assert choose_attention(torch.device("cuda"), Qwen3Config(), shares_prefix=False) == "varlen"
    said = capsys.readouterr().out
    assert (
        said.startswith("flash-attn is installed but is not used, as its import fails")
        and said.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("config", "capability", "reason"),
    [
        (Qwen3Config(), (7, 5), "the GPU has 7.5"),
        (Qwen3Config(head_dim=20), HOPPER, "they have 20"),
        (Qwen3Config(head_dim=512), HOPPER, "they have 512"),
        (transformers.DeepseekV3Config(), HOPPER, "as wide for values"),
        (transformers.BloomConfig(), HOPPER, "lets nobody choose the attention of bloom"),
        (transformers.GptOssConfig(), HOPPER, "lets nobody choose the attention of gpt_oss"),
    ],
)
def test_what_it_cannot_compute_takes_a_mask_and_a_line_says_why(
    config, capability, reason, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_attention(torch.device("cuda"), config, shares_prefix=False) == "sdpa"
    assert reason in capsys.readouterr().out


def test_scores_that_it_would_change_silently_are_refused(model):
    heads = torch.zeros(1, 2, 3, 8)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3}
    attend = asyncrl.trainer.attention.varlen_attention
    assert attend(None, heads, heads, heads, None, **bounds, softcap=None)[0].shape == (1, 3, 2, 8)
    with pytest.raises(ValueError, match="does not know the model's softcap"):
        attend(None, heads, heads, heads, None, **bounds, softcap=50.0)
