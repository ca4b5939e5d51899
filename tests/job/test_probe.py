"""The probe notices weights that arrive wrong: real engines, a trainer, each transport, and every corruption."""

import os

import pytest
import torch
import torch.distributed as dist
import transformers
from corruptions import CORRUPTIONS
from cpu_transports import CHUNK_BYTES, TRANSPORTS
from engine_pair import Pair
from tiny_policy import save_tiny_model

from asyncrl.cluster.placement import WorkerPlacement
from asyncrl.config import Config
from asyncrl.engine.vllm_setup import worker_environment
from asyncrl.job.probe import Probe

LARGEST_GAP = 1e-5
"""Nats per token between the two sides, where they have the same weights."""


def save_gemma4(path: str) -> str:
    """Write a random Gemma 4. Each of its layers has a persistent buffer, `layer_scalar`, here not 1."""
    save_tiny_model(path)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "gemma4_text",
        vocab_size=150,
        vocab_size_per_layer_input=150,
        hidden_size=128,
        hidden_size_per_layer_input=0,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_kv_shared_layers=0,
        head_dim=32,
        global_head_dim=64,
        intermediate_size=192,
        max_position_embeddings=512,
        initializer_range=0.2,
        # on a CPU vLLM packs a head, and only our shm has it pack a tied one again
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.6)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request, tmp_path_factory):
    """A trainer and an engine, joined by each transport in turn."""
    torch.set_num_threads(1)
    read_by, make, patch_transport = TRANSPORTS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        if patch_transport is not None:
            patch_transport(patch, CHUNK_BYTES)
        for name, value in worker_environment(WorkerPlacement(0, None, None, 1, 0.0)).items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = save_gemma4(os.fspath(tmp_path_factory.mktemp("model")))
        pair = Pair(
            Config(model=model, max_prompt_tokens=40, max_response_tokens=40), read_by, make
        )
        yield pair
        pair.run(pair.shutdown())
        if request.param == "nccl":
            pair.transport.close()  # or its thread would outlive these tests
        dist.destroy_process_group()


def mismatch_after(pair, version, parameters):
    """The probe's mismatch once the engine has loaded these parameters as a version."""
    pair.load(version, parameters)
    probe = Probe(pair.config)
    probe.score(pair.policy, version)
    engine = tuple(pair.run(pair.proxy.score(tokens)) for tokens in probe.tokens_at(version))
    (mismatch,) = probe.compare({version: {0: engine}})
    return mismatch


def assert_is_said(mismatch, version):
    """A run would end by this mismatch at its first version, and warn of it later, with one line."""
    assert not mismatch.is_allowed(torch.float32)
    line = mismatch.describe(torch.float32, "gemma4_text", "shm")
    assert f"at version {version}" in line and "gemma4_text" in line and "\n" not in line
    assert "weights that did not arrive by --weight-sync shm" in line


def sent(pair):
    return [(name, tensor.clone()) for name, tensor in pair.policy.sent_parameters()]


def test_the_same_weights_are_no_mismatch(pair):
    mismatch = mismatch_after(pair, 1, sent(pair))
    assert mismatch.abs_mean < LARGEST_GAP and mismatch.is_allowed(torch.float32)


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize(
    "part", ["self_attn.q_proj", "mlp.down_proj", "input_layernorm", "self_attn.k_norm"]
)
def test_a_tensor_that_arrives_wrong_is_a_mismatch(pair, kind, part):
    pair.perturb()
    parameters = sent(pair)
    mismatch = mismatch_after(
        pair, 2, CORRUPTIONS[kind](parameters, f"model.layers.0.{part}.weight")
    )
    assert_is_said(mismatch, 2)
    assert mismatch_after(pair, 3, parameters).is_allowed(torch.float32)


def test_weights_of_the_version_before_are_a_mismatch(pair):
    before = sent(pair)
    pair.perturb()
    assert_is_said(mismatch_after(pair, 4, before), 4)


def test_a_buffer_that_does_not_arrive_is_a_mismatch(pair):
    parameters = sent(pair)
    name = "model.layers.0.layer_scalar"
    assert dict(parameters)[name].item() == pytest.approx(0.6)
    forgotten = [
        (other, torch.ones_like(tensor) if other == name else tensor)
        for other, tensor in parameters
    ]
    assert_is_said(mismatch_after(pair, 5, forgotten), 5)


def test_log_probs_that_are_no_numbers_are_a_mismatch(pair):
    poisoned = [(name, torch.full_like(tensor, torch.nan)) for name, tensor in sent(pair)]
    assert_is_said(mismatch_after(pair, 6, poisoned), 6)
