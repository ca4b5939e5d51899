"""The probe notices weights that arrive wrong: real engines, a trainer, each transport, and every corruption."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cpu_transports import CHUNK_BYTES, TRANSPORTS
from engine_pair import start_pair
from tiny_policy import save_tiny_family

from asyncrl.config import Config
from asyncrl.job.arrival import ALLOWED_MISMATCH
from asyncrl.job.engine_check import EngineCheck
from asyncrl.job.probe import Mismatch, Probe
from asyncrl.messages import Probed, decoded_lengths

LARGEST_GAP = 1e-5
"""Nats per token between the two sides, where they have the same weights."""
JOINED = 7
"""A worker that joined the run, and is shut out."""
PARTS = ("self_attn.q_proj", "mlp.down_proj", "input_layernorm", "self_attn.k_norm")


def not_sent(parameters, name):
    """The place of the tensor keeps what was there: nothing yet."""
    return [(other, tensor * (other != name)) for other, tensor in parameters]


def sent_twice(parameters, name):
    """The tensor also arrives in the place of another one of its shape."""
    tensors = dict(parameters)
    shape = tensors[name].shape
    twin = next(other for other in tensors if other != name and tensors[other].shape == shape)
    return list((tensors | {twin: tensors[name]}).items())


@pytest.fixture(
    scope="module",
    params=[
        # of NCCL tests/weights/test_nccl.py has the same with an engine of several ranks
        pytest.param(name, marks=[pytest.mark.slow] if name == "nccl" else [])
        for name in TRANSPORTS
    ],
)
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


class Leader:
    """What EngineCheck asks of a node whose only engine, that of the pair, may be any worker's."""

    def __init__(self, pair):
        self.pair, self.config, self.device = pair, pair.config, torch.device("cpu")
        self.probe, self.placement = Probe(pair.config), SimpleNamespace(transport="shm")
        self.controller = self.run = self
        self.events = []
        self.engine_check = EngineCheck(self)

    def load(self, version, parameters, worker=0, decoded=None):
        """Have the engine load these parameters as a version, and check what it scores then.

        `decoded` are the log-probs of sampled tokens, if they are other weights'.
        """
        self.pair.load(version, parameters)
        self.probe.score(self.pair.policy, version)
        tokens = self.probe.tokens_at(version)
        scores = tuple(self.pair.run(self.pair.proxy.score(sequence)) for sequence in tokens)
        decoded = decoded or self.decode(tokens)
        self.take_probes = lambda: {version: {worker: Probed(version, scores, decoded)}}
        self.engine_check.check(version + 1)

    def decode(self, tokens):
        """What the engine samples now."""
        lengths = decoded_lengths(tokens)
        proxy = self.pair.proxy
        return tuple(
            self.pair.run(proxy.decode(*pair)) for pair in zip(tokens, lengths, strict=False)
        )

    def try_to_ban_host(self, worker, problem):
        return worker == JOINED

    def is_believed(self, worker):
        return worker != JOINED

    def record_event(self, event, **fields):
        self.events.append((event, fields))

    def mismatches(self):
        return [fields["mismatch/abs_mean"] for kind, fields in self.events if kind == "mismatch"]


def assert_ends_the_run(pair, version, parameters):
    line = (
        rf"^worker 0 does not have .+ at version {version} .+ did not arrive by --weight-sync shm"
    )
    with pytest.raises(RuntimeError, match=line) as ended:
        Leader(pair).load(version, parameters)
    assert "\n" not in str(ended.value)


def sent(pair):
    return [(name, tensor.clone()) for name, tensor in pair.policy.sent_parameters()]


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_an_engine_that_is_a_version_late_ends_the_run_and_one_that_is_not_is_surely_right(
    pair, capsys
):
    leader, before = Leader(pair), sent(pair)
    for version in range(6):
        leader.load(version, before, worker=JOINED)  # of whom nothing is asked any more
        before = sent(pair)
        leader.load(version, before)
        pair.perturb()
    leader.engine_check.finish()
    assert capsys.readouterr().out == "" and len(leader.probe.arrivals) == 2
    assert leader.probe.arrivals[0].whole.versions_ahead > 0.5
    leader, before = Leader(pair), sent(pair)
    leader.engine_check._allowed = 1e9  # as if rounding were large
    with pytest.raises(RuntimeError, match=r"^worker 0 has older weights .+ at version \d its"):
        for version in range(6):
            leader.load(version, before)
            before = sent(pair)
            pair.perturb()
    Leader(pair).engine_check.finish()
    assert capsys.readouterr().out == "", "no version was compared"


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_an_engine_that_decodes_with_older_weights_than_it_reads_with_ends_the_run(pair):
    """As below a CUDA graph that keeps them. Tokens are sampled by old weights here, and read by new ones."""
    leader = Leader(pair)
    leader.load(0, sent(pair))
    tokens = leader.probe.tokens_at(0)
    sampled = leader.decode(tokens)
    assert max(abs(old - read).max() for old, read in sampled) < LARGEST_GAP
    pair.perturb()
    pair.load(1, sent(pair))
    stale = [
        np.stack([old, new])
        for (old, _), (_, new) in zip(sampled, leader.decode(tokens), strict=True)
    ]
    with pytest.raises(RuntimeError, match=r"^worker 0 samples with other weights than it reads"):
        Leader(pair).load(1, sent(pair), decoded=tuple(stale))


def test_the_same_weights_are_no_mismatch_and_those_of_the_version_before_are(pair):
    before, leader = sent(pair), Leader(pair)
    leader.load(1, before)
    pair.perturb()
    assert_ends_the_run(pair, 2, before)
    leader.load(3, sent(pair))
    assert max(leader.mismatches()) < LARGEST_GAP < ALLOWED_MISMATCH["float32"]


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
@pytest.mark.parametrize("corrupt", [not_sent, sent_twice])
@pytest.mark.parametrize("part", PARTS)
def test_a_tensor_that_arrives_wrong_ends_a_run_that_has_compared_no_version_yet(
    pair, corrupt, part
):
    pair.perturb()
    parameters = sent(pair)
    assert_ends_the_run(pair, 4, corrupt(parameters, f"model.layers.0.{part}.weight"))
    Leader(pair).load(5, parameters)


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_later_weights_that_are_wrong_are_warned_of_once_and_a_joined_host_is_shut_out(
    pair, capsys
):
    leader, right = Leader(pair), sent(pair)
    wrong = not_sent(right, f"model.layers.0.{PARTS[-1]}.weight")
    leader.load(8, right)
    leader.load(8, wrong, worker=JOINED)
    for version in (9, 10):
        leader.load(version, wrong)
    (text,) = [fields["text"] for kind, fields in leader.events if kind == "warning"]
    assert text.startswith("step 10: worker 0 does not have the trainer's weights: at version 9")
    assert capsys.readouterr().out == f"warning: {text}\n"
    assert len(leader.mismatches()) == 4
    with pytest.raises(RuntimeError, match="worker 1 does not have"):
        leader.load(8, wrong, worker=1)


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_a_buffer_that_does_not_arrive_and_log_probs_that_are_no_numbers_are_a_mismatch(pair):
    parameters = dict(sent(pair))
    name = "model.layers.0.layer_scalar"
    forgotten = parameters | {name: torch.ones_like(parameters[name])}
    assert_ends_the_run(pair, 6, list(forgotten.items()))
    poisoned = {key: torch.full_like(tensor, torch.nan) for key, tensor in parameters.items()}
    assert_ends_the_run(pair, 7, list(poisoned.items()))


@pytest.mark.parametrize("field", ["abs_mean", "decoded"])
def test_the_first_weights_may_differ_by_more_than_the_limit_with_a_warning_and_not_by_much_more(
    field, capsys
):
    """In bfloat16 the limit is 0.15 nats, and the run ends above 0.375."""
    leader = Leader(SimpleNamespace(config=Config(dtype="bfloat16")))
    leader.take_probes = dict
    equal = Mismatch(worker=0, version=0, k3=0.0, abs_mean=0.0, abs_max=0.0, decoded=0.0)
    for gap, is_warned in ((0.14, False), (0.25, True)):
        leader.probe.compare = lambda _, gap=gap: [replace(equal, **{field: gap})]
        leader.engine_check.check(1)
        text = capsys.readouterr().out
        assert ("differ by 0.25 nats on average, 0.15 is allowed" in text) == is_warned
        assert ("Look at mismatch/versions_behind" in text) == is_warned
    leader.probe.compare = lambda _: [replace(equal, **{field: 0.5})]
    with pytest.raises(RuntimeError, match=r"differ by 0\.5 nats on average, 0\.375 is allowed"):
        leader.engine_check.check(1)
