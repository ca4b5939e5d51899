"""--dtype bfloat16 on the CPU: what is computed in it is close to float32, and what is trained stays float32."""

import itertools
import shutil

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
from plain_trainer import PlainTrainer, randomize, record_gradients
from tiny_policy import (
    VOCAB,
    grouped_sequences,
    load,
    make_config,
    random_sequences,
    weights_of,
)
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

import asyncrl.trainer.model
from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.dealing import distribute
from asyncrl.trainer.model import _read_model
from asyncrl.trainer.packing import bundle

pytestmark = pytest.mark.usefixtures("one_rank")
UP_PROJECTION = "model.layers.0.mlp.up_proj.weight"


def assert_close(gradient, expected):
    """Gradients point the same way, within what 8 bits of a mantissa leave of 2 layers: 5 %."""
    pairs = [(gradient[name].flatten(), expected[name].flatten()) for name in expected]
    actual, exact = (torch.cat(parts).double() for parts in zip(*pairs, strict=True))
    assert (actual - exact).norm() < 0.05 * exact.norm()


OPTIONS = {
    "shared prefixes, recomputed": {"share_prefix": "tree", "save_memory": ("activations",)},
    "adapters and KL, both saved": {
        "lora_rank": 4,
        "kl_coef": 0.1,
        "save_memory": ("activations", "optimizer"),
    },
    "values": {"advantage": "gae"},
    "two updates, interpolated": {
        "algo": "decoupled_ppo",
        "minibatches": 2,
        "proximal": "loglinear",
        "lr": 1e-3,
        "kl_coef": 0.1,
    },
    "cold, by sequence": {"temperature": 0.7, "algo": "gspo", "loss_aggregation": "sequence_mean"},
}


@pytest.mark.parametrize(
    ("name", "attention"), zip(OPTIONS, itertools.cycle(["sdpa", "varlen"]), strict=False)
)
def test_bfloat16_computes_about_what_float32_does_and_not_the_same(
    model, name, attention, monkeypatch
):
    """As a GPU computes, by chunks of the head; tolerance 5 % of the gradient, and 0.05 nats of the mean log-prob."""
    config = make_config(model, dtype="bfloat16", **OPTIONS[name])
    if config.share_prefix == "off":
        monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: attention)
    policy = load(config)
    randomize(policy)
    policy.module.chunk_rows = 7
    plain, gradients = PlainTrainer(policy), record_gradients(policy)
    sequences = grouped_sequences(6, 4)
    scores, exact = policy.score([sequences])[0], plain.read(sequences)[0]
    assert scores.dtype == torch.float32
    assert 1e-4 < (scores - exact).abs().mean() < 0.05
    updates = [sequences[i :: config.minibatches] for i in range(config.minibatches)]
    share = distribute(updates, 1, 200, config.share_prefix, policy.module.cost)[0]
    metrics = policy.train_step(share, policy_version=11)
    expected, expected_gradients = plain.train_step(updates, 11)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    assert_close(gradients[0], expected_gradients[0])


def test_what_is_trained_and_kept_stays_float32_and_what_is_sent_is_bfloat16(model):
    optim = OptimOptions(warmup=0)
    config = make_config(model, dtype="bfloat16", optimizer="adamw", lr=1e-6, optim=optim)
    policy = load(config)
    before = weights_of(policy)
    policy.train_step([[bundle(random_sequences(8))]], policy_version=11)
    after = dict(policy.named_full_parameters())
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    states = [tensors for state in policy.optimizer.state.values() for tensors in state.items()]
    assert {tensor.dtype for name, tensor in states if "exp" in name} == {torch.float32}
    assert {spec.dtype for spec in policy.sent_specs()} == {torch.bfloat16}
    # 1e-6 is below what bfloat16 could add to most of it
    old, new = before[UP_PROJECTION], after[UP_PROJECTION]
    assert (new != old).float().mean() > 0.9
    assert (new.bfloat16() != old.bfloat16()).float().mean() < 0.1


def dtypes_of(module):
    return {parameter.dtype for parameter in module.parameters()}


def test_what_is_frozen_is_kept_in_the_dtype_of_computing_and_adapters_in_float32(model):
    """A reference computes what float32 weights do, which are rounded to it before each use."""
    assert dtypes_of(load(make_config(model, kl_coef=0.1)).reference) == {torch.float32}
    policy = load(make_config(model, dtype="bfloat16", kl_coef=0.1))
    assert dtypes_of(policy.reference) == {torch.bfloat16}
    sequences = [random_sequences(8)]
    scores = policy.score(sequences)[0]
    policy.module = policy.reference
    assert torch.equal(policy.score(sequences)[0], scores)
    adapted = load(make_config(model, dtype="bfloat16", lora_rank=2))
    for name, parameter in adapted.module.named_parameters():
        is_adapter = name.endswith(("lora_A", "lora_B"))
        assert parameter.dtype == (torch.float32 if is_adapter else torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "on_gpu"),
    [("auto", "float32", "bfloat16"), ("bfloat16",) * 3, ("float16",) * 3],
)
def test_auto_is_float32_on_the_cpu_and_bfloat16_on_a_gpu(dtype, on_cpu, on_gpu):
    """tests/cluster/cases.toml has float32, which a GPU does not take."""
    config = Config(dtype=dtype)
    assert (config.dtype_on("cpu"), config.dtype_on("cuda")) == (on_cpu, on_gpu)


# Reading


def test_a_model_that_is_stored_in_bfloat16_is_read_in_it(model, tmp_path):
    folder = str(shutil.copytree(model, tmp_path / "model"))
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    read = _read_model(folder, torch.float32)
    assert dtypes_of(read) == {torch.bfloat16}
    assert {buffer.dtype for buffer in read.buffers()} == {torch.float32}
    assert dtypes_of(_read_model(model, torch.float32)) == {torch.float32}


def test_a_buffer_that_bfloat16_would_round_is_not_rounded(tmp_path):
    """The scale of a Gemma's embedding is a buffer, √40."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=40,
        intermediate_size=48,
        pad_token_id=0,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        head_dim=8,
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    embedding = load(make_config(str(tmp_path))).module.model.model.embed_tokens
    assert embedding.embed_scale.item() == pytest.approx(40**0.5, abs=1e-6)
