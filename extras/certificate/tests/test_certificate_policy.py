"""A check scores each token as the policy did when it had the stamped version, and leaves no trace in training.

The oracle is a policy without the option. It makes the same steps, and scores tokens whenever it has a new version.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_group
from tiny_policy import (
    grouped_sequences,
    load,
    make_config,
    random_sequences,
    save_tiny_family,
    save_tiny_model,
    weights_of,
)

from asyncrl.trainer.splitting import distribute

pytestmark = pytest.mark.usefixtures("one_rank")
NUM_STEPS, BUDGET, STALENESS = 5, 64, 2
LENGTH = 24
CASES = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "shared prefixes": {"share_prefix": "prompt"},
    "adapters": {"lora_rank": 3},
    "adapters in bfloat16": {"lora_rank": 3, "dtype": "bfloat16"},
    "offloaded": {"save_memory": ("optimizer",)},
    "a nucleus, two minibatches and a value head": {
        "top_p": 0.9,
        "minibatches": 2,
        "advantage": "gae",
    },
}


def stamped(sequences, version, seed):
    """The sequences with versions up to `version`: most are of one, some were sampled through updates."""
    rng = np.random.default_rng(seed)
    result = []
    for sequence in sequences:
        oldest = max(0, version - int(rng.integers(0, STALENESS + 1)))
        growth = np.sort(rng.integers(0, 2 + int(rng.integers(0, 2)), len(sequence.tokens)))
        versions = np.minimum(oldest + growth, version).astype(np.int32)
        versions = np.where(sequence.loss_mask, versions, -1)
        oldest = int(versions[sequence.loss_mask].min())
        result.append(replace(sequence, policy_versions=versions, oldest_version=oldest))
    return result


def live_scores(policy, sequences):
    """The log-probs of each sequence's trained tokens under the weights of now; collective."""
    with torch.no_grad():
        return [
            policy.forward(
                policy.module, policy.pack_to_train([sequence], NUM_STEPS)
            ).logprobs.cpu()
            for sequence in sequences
        ]


def train(policy, sequences, version):
    budget = policy.config.max_tokens_per_microbatch
    layout, num_ranks = policy.module.layout, dist.get_world_size()
    half = len(sequences) // policy.config.minibatches
    updates = [sequences[:half], sequences[half:]][: policy.config.minibatches]
    shares = distribute(updates, num_ranks, budget, layout, policy.split_over_ranks)
    share = [[*update, []] for update in shares[dist.get_rank()]]
    return policy.train_step(share, version)


def expected_means(sequences, scores, version, lag=None):
    """Means of |mismatch| and |drift| over tokens, by loops; of one lag, or of all."""
    mismatches, drifts = [], []
    for index, sequence in enumerate(sequences):
        versions = sequence.policy_versions[sequence.loss_mask]
        recorded = sequence.behavior_logprobs[sequence.loss_mask]
        for place, stamp in enumerate(versions.tolist()):
            if lag is None or version - stamp == lag:
                score = scores[stamp][index][place].item()
                mismatches.append(abs(float(recorded[place]) - score))
                drifts.append(abs(score - scores[version][index][place].item()))
    return len(mismatches), np.mean(mismatches), np.mean(drifts)


def check_certificate(rank, options, sequences_of_steps):
    config = {"async_ratio": STALENESS, "steps": NUM_STEPS, "max_grad_norm": 1.0}
    config = make_config(**config | options)
    # in bfloat16 rounding depends on the packing, so each sequence is alone, as it is in the oracle
    budget = LENGTH if config.dtype == "bfloat16" else BUDGET
    config = replace(config, max_tokens_per_microbatch=budget)
    plain, policy = load(config), load(replace(config, certificate=2))
    tolerance = {"rel": 1e-4, "abs": 1e-6}
    scores = []  # [version][step]: those of each step whose tokens can have the version
    for version, sequences in enumerate(sequences_of_steps):
        near = range(version, min(version + STALENESS + 1, NUM_STEPS))
        scores.append({step: live_scores(plain, sequences_of_steps[step]) for step in near})
        plain_metrics = train(plain, sequences, version)
        metrics = train(policy, sequences, version)
        shown = {
            name.removeprefix("certificate/"): value
            for name, value in metrics.items()
            if name.startswith("certificate/")
        }
        for name in shown:
            del metrics[f"certificate/{name}"]
        if config.router_replay:  # the oracle's own scores are packed, too
            num_bytes = sum(sequence.experts.nbytes for sequence in sequences)
            assert metrics["experts/recorded_mib"] == num_bytes / 2**20
            plain_metrics["experts/recorded_mib"] = num_bytes / 2**20
        assert metrics == plain_metrics
        weights, expected_weights = weights_of(policy), weights_of(plain)
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
        step = version + 1
        assert bool(shown) == (step % 2 == 0 or step == NUM_STEPS)
        if not shown:
            continue
        assert shown["unscored"] == 0
        own = [of_version.get(version) for of_version in scores]
        for lag in (None, *range(min(version, STALENESS) + 1)):
            ending = "" if lag is None else f"/lag_{lag}"
            num, mismatch, drift = expected_means(sequences, own, version, lag)
            assert shown[f"tokens{ending}"] == num > 0
            assert shown[f"mismatch_abs{ending}"] == pytest.approx(mismatch, **tolerance)
            assert shown[f"drift_abs{ending}"] == pytest.approx(drift, **tolerance)
    assert drift > 1e-3  # versions differ, so a wrong one would show
    return shown


def batches(make):
    """The sequences of each step: fewer than a check takes from each of two ranks."""
    return [stamped(make(seed), seed, seed) for seed in range(NUM_STEPS)]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_scored_under_their_versions_and_training_is_equal_to_the_bit(case, tmp_path):
    options = {"model": save_tiny_model(str(tmp_path))} | CASES[case]
    is_rounded = options.get("dtype") == "bfloat16"
    check_certificate(
        0,
        options,
        batches(
            lambda seed: (
                random_sequences(16, seed, LENGTH, LENGTH)
                if is_rounded
                else grouped_sequences(4, 4, seed)
            )
        ),
    )


def test_on_two_ranks_all_have_the_same_check(tmp_path):
    options = {"model": save_tiny_model(str(tmp_path)), "share_prefix": "prompt"}
    shown = run_group(
        check_certificate, 2, options, batches(lambda seed: grouped_sequences(4, 4, seed))
    )
    for values in shown:
        del values["seconds"]
    assert shown[0] == shown[1]


def test_recorded_experts_are_replayed(tmp_path):
    def routed(seed):
        rng = np.random.default_rng(seed)
        sequences = random_sequences(12, seed, min_tokens=6)
        return [
            replace(s, experts=rng.random((len(s.tokens) - 1, 2, 4)).argsort(-1)[..., :2].astype(np.uint8))
            for s in sequences
        ]  # fmt: skip

    model = save_tiny_family("qwen3_moe", str(tmp_path))
    check_certificate(0, {"model": model, "router_replay": True}, batches(routed))


def test_32_responses_are_drawn_and_tokens_of_forgotten_versions_are_counted(tmp_path):
    """After a resume the first steps have tokens of versions that no snapshot has."""
    config = make_config(
        save_tiny_model(str(tmp_path)), certificate=1, async_ratio=1, steps=100, lr=1e-3
    )
    policy = load(replace(config, max_tokens_per_microbatch=BUDGET))
    sequences = random_sequences(40, min_tokens=8, max_tokens=8)

    def metrics(version, stamp):
        versions = np.full(8, stamp, np.int32)
        batch = [replace(s, policy_versions=versions, oldest_version=stamp) for s in sequences]
        return train(policy, batch, version)

    resumed = metrics(50, 49)
    assert resumed["certificate/unscored"] == 1 and resumed["certificate/tokens"] == 0
    assert not any(resumed[f"certificate/alarm_{rule}"] for rule in ("size", "shift", "version"))
    later = metrics(51, 50)
    assert later["certificate/unscored"] == 0
    assert later["certificate/tokens"] == later["certificate/tokens/lag_1"] == 32 * 6
