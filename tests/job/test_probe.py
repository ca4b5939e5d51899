"""The probe notices weights that arrive wrong: real engines, a trainer, each transport, and every corruption."""

import os

import pytest
import torch
from corruptions import CORRUPTIONS
from cpu_transports import CHUNK_BYTES, TRANSPORTS
from engine_pair import start_pair
from tiny_policy import save_tiny_family

from asyncrl.config import Config
from asyncrl.job.probe import ALLOWED_MISMATCH, Probe

ALLOWED = ALLOWED_MISMATCH[torch.float32]
LARGEST_GAP = 1e-5
"""Nats per token between the two sides, where they have the same weights."""
PARTS = ("self_attn.q_proj", "mlp.down_proj", "input_layernorm", "self_attn.k_norm")


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request, tmp_path_factory):
    """A trainer and an engine, joined by each transport in turn; each layer of the model has a persistent buffer."""
    read_by, make, patch_transport = TRANSPORTS[request.param]
    patches = [lambda patch: patch_transport(patch, CHUNK_BYTES)] if patch_transport else []
    folder = os.fspath(tmp_path_factory.mktemp("model"))
    # on a CPU vLLM packs a head, and only our shm has it pack a tied one again
    model = save_tiny_family("gemma4_text", folder, tie_word_embeddings=False)
    config = Config(model=model, max_prompt_tokens=40, max_response_tokens=40)
    with start_pair(config, read_by, make, patches=patches) as pair:
        yield pair


def mismatch_after(pair, version, parameters):
    """The probe's mismatch once the engine has loaded these parameters as a version."""
    pair.load(version, parameters)
    probe = Probe(pair.config)
    probe.score(pair.policy, version)
    engine = tuple(pair.run(pair.proxy.score(tokens)) for tokens in probe.tokens_at(version))
    (mismatch,) = probe.compare({version: {0: engine}})
    return mismatch


def assert_is_mismatch(pair, version, parameters):
    """A run would end by this mismatch at its first version, and warn of it later, with one line."""
    mismatch = mismatch_after(pair, version, parameters)
    assert not mismatch.abs_mean <= ALLOWED, "NaN is none that is allowed"
    line = mismatch.describe(ALLOWED, "shm")
    assert f"at version {version}" in line and "\n" not in line
    assert "weights that did not arrive by --weight-sync shm" in line


def sent(pair):
    return [(name, tensor.clone()) for name, tensor in pair.policy.sent_parameters()]


def test_the_same_weights_are_no_mismatch_and_those_of_the_version_before_are(pair):
    before = sent(pair)
    mismatch = mismatch_after(pair, 1, before)
    assert mismatch.abs_mean < LARGEST_GAP < ALLOWED
    pair.perturb()
    assert_is_mismatch(pair, 2, before)
    assert mismatch_after(pair, 3, sent(pair)).abs_mean < LARGEST_GAP


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("part", PARTS)
def test_a_tensor_that_arrives_wrong_is_a_mismatch(pair, kind, part):
    pair.perturb()
    parameters = sent(pair)
    corrupted = CORRUPTIONS[kind](parameters, f"model.layers.0.{part}.weight")
    assert_is_mismatch(pair, 4, corrupted)
    assert mismatch_after(pair, 5, parameters).abs_mean <= ALLOWED


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_a_buffer_that_does_not_arrive_and_log_probs_that_are_no_numbers_are_a_mismatch(pair):
    parameters = dict(sent(pair))
    name = "model.layers.0.layer_scalar"
    forgotten = parameters | {name: torch.ones_like(parameters[name])}
    assert_is_mismatch(pair, 6, list(forgotten.items()))
    poisoned = {key: torch.full_like(tensor, torch.nan) for key, tensor in parameters.items()}
    assert_is_mismatch(pair, 7, list(poisoned.items()))
