"""The trainer's gates with recorded experts, against a plain model whose routers weigh them by definition."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_trainer import PlainTrainer, check_step, make_step, randomize, relative_error
from ranks import run_group
from tiny_policy import VERSION, load, make_config, random_sequences, save_tiny_family

from asyncrl.config import OptimOptions
from asyncrl.job.inputs import check_model
from extras.router_replay.option import FAMILIES
from extras.router_replay.policy import Replaying

pytestmark = pytest.mark.usefixtures("one_rank")
NUM_EXPERTS, TOP_K, NUM_LAYERS = 4, 2, 2


CASES = [
    ("qwen3_moe", {"norm_topk_prob": False}, {"kl_coef": 0.3}),
    ("qwen3_moe", {}, {"save_memory": ("activations",), "lora_rank": 3}),
    ("mixtral", {}, {"save_memory": ("activations",), "minibatches": 2}),
    ("gpt_oss", {}, {"optim": OptimOptions(epochs=2)}),
    ("olmoe", {}, {"algo": "gspo"}),
]
"""The model's family and options, and those of the step."""


def test_counts_are_where_routers_compute_also_if_weights_are_in_host_memory(tmp_path):
    path = save_tiny_family("qwen3_moe", str(tmp_path))
    policy = load(make_config(path, router_replay=True, save_memory=("optimizer",)))
    policy.device = torch.device("meta")  # weights stay on the CPU
    (replay,) = Replaying(policy)._replays.values()
    assert replay.take_counts().device.type == "meta"


def with_experts(sequences, seed=0):
    """The sequences with random experts for each of their tokens but the last."""
    rng = np.random.default_rng(seed)
    routed = []
    for sequence in sequences:
        scores = rng.random((len(sequence.tokens) - 1, NUM_LAYERS, NUM_EXPERTS))
        experts = scores.argsort(axis=-1)[..., :TOP_K].astype(np.uint8)
        routed.append(replace(sequence, experts=experts))
    return routed


class PlainReplay(PlainTrainer):
    """The oracle of the trainer, which reads each sequence alone, with each router as equations have it."""

    def __init__(self, policy):
        super().__init__(policy)
        self.num_new, self.num_recorded = 0, 0
        for model in (self.model, self.reference):
            for name, module in model.named_modules():
                if name.endswith(("mlp.gate", "mlp.router")):
                    layer = int(re.search(r"layers\.(\d+)", name)[1])
                    self.replace_choice(module, layer, is_counted=model is self.model)

    def replace_choice(self, router, layer, is_counted):
        own_choice = router.forward
        normalises = getattr(router, "norm_topk_prob", True)

        def choose(hidden):
            logits, weights, experts = own_choice(hidden)
            recorded = torch.from_numpy(self.sequence.experts[:, layer]).long()
            chances = logits[:-1].double().exp()
            recorded_chances = chances.gather(1, recorded)
            totals = (recorded_chances if normalises else chances).sum(dim=1, keepdim=True)
            if is_counted and torch.is_grad_enabled():
                pairs = zip(recorded.tolist(), experts[:-1].tolist(), strict=True)
                self.num_new += sum(len({*new} - {*own}) for new, own in pairs)
                self.num_recorded += recorded.numel()
            # the last token has no record
            rows = torch.cat([(recorded_chances / totals).to(weights.dtype), weights[-1:]])
            return logits, rows, torch.cat([recorded, experts[-1:]])

        router.forward = choose

    def train_step(self, updates):
        metrics, gradients = super().train_step(updates)
        trained = [s for update in updates for s in update if s.num_trained]
        metrics["experts/rerouted"] = self.num_new / self.num_recorded
        metrics["experts/recorded_mib"] = sum(s.experts.nbytes for s in trained) / 2**20
        return metrics, gradients


def check_case(rank, path, options):
    """Compare a step with the definition."""
    policy = load(make_config(path, router_replay=True, **options))
    check_model(policy.config, path, "cuda")
    randomize(policy)
    updates = [
        with_experts(random_sequences(9, seed), seed) for seed in range(policy.config.minibatches)
    ]
    (untrained,) = random_sequences(1, seed=7)
    nothing = np.zeros_like(untrained.loss_mask)
    updates[0].append(replace(untrained, loss_mask=nothing, oldest_version=None))
    check_step(policy, updates, 40, PlainReplay(policy).train_step(updates))


@pytest.mark.parametrize(("family", "family_options", "options"), CASES)
def test_a_step_is_that_of_a_plain_model_whose_routers_weigh_the_recorded_experts(
    family, family_options, options, tmp_path
):
    check_case(0, save_tiny_family(family, str(tmp_path), **family_options), options)


def test_two_ranks_make_that_step_too(tmp_path):
    path = save_tiny_family("qwen3_moe", str(tmp_path))
    run_group(check_case, 2, path, {"minibatches": 2})


def test_float16_has_the_gradient_of_a_small_loss_with_the_recorded_experts(tmp_path):
    """The tolerance is 1 %, as 11 bits leave of 2 layers.

    Without a scaled loss most of the gradient is below the least number of float16.
    """
    path = save_tiny_family("gpt_oss", str(tmp_path))
    policy = load(make_config(path, router_replay=True, dtype="float16", algo="reinforce"))
    sequences = [replace(s, advantage=s.advantage * 1e-5) for s in random_sequences(9)]
    updates = [with_experts(sequences)]
    expected_metrics, (expected,) = PlainReplay(policy).train_step(updates)
    metrics, (gradient,) = make_step(policy, updates, 40)
    assert relative_error(gradient, expected) < 0.01
    assert metrics["loss/skipped_updates"] == 0
    # rounding may decide between two experts of about equal logits
    rerouted = expected_metrics["experts/rerouted"]
    assert metrics["experts/rerouted"] == pytest.approx(rerouted, abs=0.02)


def test_what_is_scored_without_a_record_and_a_policy_without_the_option_choose_themselves(
    tmp_path,
):
    path, routed = save_tiny_family("qwen3_moe", str(tmp_path)), with_experts(random_sequences(5))
    plain = load(make_config(path))
    replaying = load(make_config(path, router_replay=True, lr=1e-12))
    replaying.train_step([[routed]], VERSION)
    scores = [policy.logprobs_of([random_sequences(3)])[0] for policy in (plain, replaying)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-6)
    check_step(plain, [routed], 1000)


def test_a_record_that_is_missing_or_does_not_fit_ends_in_a_line(tmp_path):
    policy = load(make_config(save_tiny_family("qwen3_moe", str(tmp_path)), router_replay=True))
    (sequence,) = random_sequences(1)

    def step(experts):
        return policy.train_step([[[replace(sequence, experts=experts)]]], VERSION)

    with pytest.raises(ValueError, match=r"^--router-replay got a response without experts: its "):
        step(None)
    with pytest.raises(
        RuntimeError, match=rf"^the engine returned experts \({len(sequence.tokens)}, 2, 2\) for "
    ):
        step(np.zeros((len(sequence.tokens), 2, 2), np.uint8))


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_a_model_without_routers_that_are_known_is_refused_in_a_line(family, tmp_path):
    """errors.toml beside this file has the options that are refused."""
    path = save_tiny_family(family, str(tmp_path))
    line = (
        f"^--router-replay knows the routers of {', '.join(FAMILIES)}, and a {family} has others or none; leave it "
        "out, or take another --model$"
    )
    with pytest.raises(ValueError, match=line):
        check_model(make_config(path, router_replay=True), path, "cuda")
