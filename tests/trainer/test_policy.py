import functools
import inspect
import json
import math
import os
import shutil
import subprocess
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch
from own_files import LOSS, write_own
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_policy import (
    VOCAB,
    assert_same_gradient,
    brute_force_nucleus,
    error_of,
    first_gradient,
    load,
    random_sequences,
    run_on_two_ranks,
    save_tiny_model,
    save_with_a_file_size_limit,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3nConfig,
    LlamaConfig,
)
from transformers import LlamaForCausalLM as Llama

from algos import KL_ESTIMATORS, LOSSES
from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.checkpoint import save_weights, write_folder
from asyncrl.trainer.packing import bundle, pack

CPU = torch.device("cpu")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
ON_TWO_RANKS = ("gspo", "decoupled_ppo", "icepop", "m2po")
"""Losses that look at more than one token or at the proximal policy; the aggregations are tested with tis."""


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("tied")), tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("untied")), tied=False)


def make_config(model, **options):
    """No gradient clipping and a wide loss clip, so that gradients can be compared with a plain sum."""
    return Config(
        **{
            "model": model,
            "algo": "tis",
            "algo_args": ("clip_high=10",),
            "max_grad_norm": 1e9,
            **options,
        }
    )


def wide_clip(algo):
    """Options of make_config with which the loss clips some of random_sequences, but not most."""
    takes_clip = "clip_high" in inspect.signature(LOSSES[algo]).parameters
    return {"algo_args": ("clip_low=0.5", "clip_high=3") if takes_clip else ()}


def share_of(sequences, budget=100_000):
    return distribute([sequences], 1, budget)[0]


def plain_logprobs(path, sequences, transform=lambda row, target: row):
    """Log-probs of the trained tokens, sequence by sequence and token by token."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    logprobs = []
    for sequence in sequences:
        logits = model(torch.from_numpy(sequence.tokens)[None]).logits[0]
        for t in np.flatnonzero(sequence.loss_mask):
            target = int(sequence.tokens[t])
            logprobs.append(torch.log_softmax(transform(logits[t - 1], target), dim=-1)[target])
    return torch.stack(logprobs)


# Log-probs


@pytest.mark.parametrize("budget", [30, 150, 100_000])
@pytest.mark.parametrize("tying", ["tied", "untied"])
def test_packed_logprobs_equal_those_of_single_sequences(tying, budget, request):
    path = request.getfixturevalue(tying)
    microbatches = [
        [s for b in bundles for s in b.sequences]
        for bundles in share_of(random_sequences(20), budget)[0]
    ]
    policy = load(make_config(path))
    for sequences, scores in zip(microbatches, policy.score(microbatches, raw=True), strict=True):
        torch.testing.assert_close(scores, plain_logprobs(path, sequences), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "cuts"),
    [
        *((0.7, (1.0, 0, 0.0)), (1.0, (0.8, 0, 0.0)), (1.3, (0.35, 0, 0.0)), (1.0, (1e-6, 0, 0.0))),
        *((0.8, (1.0, 5, 0.0)), (0.8, (1.0, 0, 0.1)), (1.2, (0.9, 7, 0.05))),
    ],
)
def test_score_applies_the_sampling_transform(tied, temperature, cuts):
    sequences = random_sequences(4, max_tokens=10)
    options = dict(zip(("top_p", "top_k", "min_p"), cuts, strict=True))
    policy = load(make_config(tied, temperature=temperature, **options))

    def transform(row, target):
        return brute_force_nucleus(row, target, temperature, *cuts)

    expected = plain_logprobs(tied, sequences, transform)
    torch.testing.assert_close(policy.score([sequences])[0], expected, rtol=1e-5, atol=1e-5)


def test_llama_works_as_well_as_qwen(tmp_path):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }
    Llama(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(
        tmp_path
    )
    sequences = random_sequences(6)
    scores = load(make_config(str(tmp_path))).score([sequences], raw=True)[0]
    torch.testing.assert_close(
        scores, plain_logprobs(str(tmp_path), sequences), rtol=1e-5, atol=1e-5
    )


# Gradients


def plain_gradient(path, sequences, aggregation, max_response_tokens):
    """Gradient of the TIS loss by its definition: one sequence at a time, unpacked, unsharded."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    trained = [s for s in sequences if s.num_trained]
    loss = 0.0
    for s in trained:
        logprobs = torch.log_softmax(model(torch.from_numpy(s.tokens)[None]).logits[0], dim=-1)
        of_tokens = []
        for t in np.flatnonzero(s.loss_mask):
            logprob = logprobs[t - 1, int(s.tokens[t])]
            weight = min(math.exp(logprob.item() - float(s.behavior_logprobs[t])), 10.0)
            of_tokens.append(-weight * s.advantage * logprob)
        divisor = {
            "token_mean": sum(s.num_trained for s in trained),
            "sequence_mean": len(trained) * s.num_trained,
            "constant": len(trained) * max_response_tokens,
        }[aggregation]
        loss = loss + sum(of_tokens) / divisor
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("budget", [24, 75, 100_000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_is_that_of_the_definition_for_any_microbatch_budget(untied, aggregation, budget):
    sequences = random_sequences(17, seed=3)
    policy = load(make_config(untied, loss_aggregation=aggregation))
    metrics = policy.train_step(share_of(sequences, budget), policy_version=12)
    loss, gradient = plain_gradient(
        untied, sequences, aggregation, policy.config.max_response_tokens
    )
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same_gradient(first_gradient(policy), gradient)


@pytest.fixture(scope="module")
def two_ranks(tied, tmp_path_factory):
    """What two real gloo ranks found, for each aggregation, and for 3 sequences in 1-sequence micro-batches with KL."""
    folder = str(tmp_path_factory.mktemp("two_ranks"))
    cases = [
        (make_config(tied, loss_aggregation=a), [random_sequences(17, seed=3)], 60)
        for a in AGGREGATIONS
    ]
    cases += [
        (make_config(tied, algo=algo, **wide_clip(algo)), [random_sequences(17, seed=3)], 60)
        for algo in ON_TWO_RANKS
    ]
    adapters = make_config(
        tied, lora_rank=3, kl_coef=0.1, lr=1e-3, optim=OptimOptions(warmup=0), minibatches=2
    )
    cases.append((adapters, [random_sequences(17, seed=3), random_sequences(9, seed=4)], 60))
    cases.append(
        (
            make_config(tied, kl_coef=0.1, lr=1e-2, minibatches=2),
            [random_sequences(3, seed=1)] * 2,
            24,
        )
    )
    assert run_ranks(run_on_two_ranks, 2, folder, cases) == [0, 0]
    return cases, torch.load(os.path.join(folder, "results.pt")), folder


@pytest.mark.parametrize("case", range(len(AGGREGATIONS)), ids=AGGREGATIONS)
def test_two_ranks_give_the_gradient_and_metrics_of_one(two_ranks, case):
    cases, found, _ = two_ranks
    config, updates, _ = cases[case]
    metrics, gradient = found["results"][case]
    policy = load(config)
    expected = policy.train_step(share_of(updates[0]), policy_version=12)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_same_gradient(gradient, first_gradient(policy))
    plain = plain_gradient(
        config.model, updates[0], config.loss_aggregation, config.max_response_tokens
    )[1]
    assert_same_gradient(gradient, plain)


@pytest.mark.parametrize("case", range(len(ON_TWO_RANKS)), ids=ON_TWO_RANKS)
def test_two_ranks_give_the_gradient_of_one_for_other_losses(two_ranks, case):
    cases, found, _ = two_ranks
    config, updates, _ = cases[len(AGGREGATIONS) + case]
    metrics, gradient = found["results"][len(AGGREGATIONS) + case]
    policy = load(config)
    expected = policy.train_step(share_of(updates[0]), policy_version=12)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_same_gradient(gradient, first_gradient(policy))


def test_two_ranks_train_adapters_as_one_does(two_ranks):
    """Tolerance 1e-3: in the second update, the first with a gradient of A, AdamW has amplified rounding."""
    cases, found, _ = two_ranks
    config, updates, _ = cases[-2]
    metrics, moments = found["results"][-2]
    policy = load(config)
    expected = policy.train_step(distribute(updates, 1, 1000)[0], policy_version=12)
    assert config.lora_rank and len(moments) == 28
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert_same_gradient(moments, first_gradient(policy), relative=1e-3)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("algo", LOSSES)
def test_packing_order_and_microbatches_change_no_gradient_of_any_loss(tied, algo, aggregation):
    sequences = random_sequences(9, seed=5)
    config = make_config(tied, algo=algo, loss_aggregation=aggregation, **wide_clip(algo))
    results = []
    for given, budget in ((sequences, 100_000), (sequences[::-1], 30)):
        policy = load(config)
        metrics = policy.train_step(share_of(given, budget), policy_version=12)
        results.append((metrics, first_gradient(policy)))
    assert results[0][0]["grad_norm"] > 0
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4, abs=1e-6)
    assert_same_gradient(results[0][1], results[1][1])


def test_a_rank_without_sequences_keeps_the_others_company(two_ranks):
    cases, found, _ = two_ranks
    config, updates, budget = cases[-1]
    assert len({len(rank[0]) for rank in distribute(updates, 2, budget)}) == 2
    policy = load(config)
    expected = policy.train_step(distribute(updates, 1, 1000)[0], policy_version=12)
    # After the first AdamW update, whose steps are near ±lr whatever the gradient's size, rounding is amplified.
    assert found["results"][-1][0] == pytest.approx(expected, rel=1e-2, abs=1e-4)


def test_two_ranks_save_one_loadable_checkpoint_and_both_hear_of_a_failure(two_ranks):
    _, found, folder = two_ranks
    AutoModelForCausalLM.from_pretrained(os.path.join(folder, "step_1"))
    for exists, not_finite in found["errors"]:
        assert exists.startswith("OSError: checkpoint") and "exists already" in exists
        assert not_finite.startswith("NotFinite: loss nan")


# Updates


def test_updates_raise_the_probability_of_what_was_good_and_lower_that_of_what_was_bad(tied):
    sequences = [
        replace(s, advantage=(1.0, -1.0)[i % 2])
        for i, s in enumerate(random_sequences(10, max_tokens=12))
    ]
    policy = load(
        make_config(tied, algo="reinforce", algo_args=(), lr=1e-3, optim=OptimOptions(warmup=0))
    )
    before = [policy.score([[s]])[0].mean() for s in sequences]
    for version in range(5):
        policy.train_step(share_of(sequences), 12 + version)
    for i, s in enumerate(sequences):
        change = policy.score([[s]])[0].mean() - before[i]
        assert change > 0 if s.advantage > 0 else change < 0


def test_the_trainers_clock_is_told_when_each_optimizer_step_begins_and_ends(tied):
    policy, entered = load(make_config(tied)), []
    policy.clock.enter = lambda state: entered.append((state, policy.num_updates))
    policy.train_step([*share_of(random_sequences(2)), *share_of(random_sequences(2))], 12)
    assert entered[1:] == [
        ("optimizer", 0),
        ("forward_backward", 1),
        ("optimizer", 1),
        ("forward_backward", 2),
    ]


def test_the_share_of_weights_that_an_update_changes_is_that_in_bfloat16(tied):
    policy = load(make_config(tied, lr=1e-5, optim=OptimOptions(warmup=1)))
    before = {name: tensor.bfloat16() for name, tensor in policy.named_full_parameters()}
    stats = policy.train_step(share_of(random_sequences(2)), 12)
    after = {name: tensor.bfloat16() for name, tensor in policy.named_full_parameters()}
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    assert 0 < changed < sum(tensor.numel() for tensor in before.values())
    assert stats["changed_weights"] == pytest.approx(
        changed / sum(tensor.numel() for tensor in before.values())
    )


def test_the_slope_is_the_norm_of_the_loss_s_derivatives_by_the_log_probs(tied):
    sequences = random_sequences(3)
    stats = load(make_config(tied, algo="reinforce", algo_args=())).train_step(
        share_of(sequences), 12
    )
    advantages = np.concatenate([np.full(s.loss_mask.sum(), s.advantage) for s in sequences])
    assert stats["slope"] == pytest.approx(np.linalg.norm(advantages) / len(advantages), rel=1e-5)


def test_learning_rate_warms_up_linearly(tied):
    policy = load(make_config(tied, lr=0.01, optim=OptimOptions(warmup=4)))
    rates = [policy.train_step(share_of(random_sequences(2)), 12)["lr"] for _ in range(6)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_gradient_norm_is_reported_before_clipping_and_the_step_is_clipped(tied):
    sequences = random_sequences(5)
    free, clipped = (load(make_config(tied, max_grad_norm=m)) for m in (1e9, 0.01))
    norms = [policy.train_step(share_of(sequences), 12)["grad_norm"] for policy in (free, clipped)]
    assert norms[0] == norms[1] > 0.01
    taken = math.sqrt(sum(float(g.square().sum()) for g in first_gradient(clipped).values()))
    assert taken == pytest.approx(0.01, rel=1e-3)


def test_drift_and_ratio_are_those_of_behavior_against_current_policy(tied):
    sequences = random_sequences(6)
    policy = load(make_config(tied, algo_args=()))
    logprobs = policy.score([sequences])[0].double().tolist()
    behavior = (
        np.concatenate([s.behavior_logprobs[s.loss_mask] for s in sequences]).astype(float).tolist()
    )
    metrics = policy.train_step([[bundle(sequences)]], policy_version=12)
    ratios = [math.exp(p - b) for p, b in zip(logprobs, behavior, strict=True)]
    n = len(ratios)
    assert metrics["tokens"] == n
    assert metrics["ratio"] == pytest.approx(sum(ratios) / n, rel=1e-4)
    assert metrics["drift/k1"] == pytest.approx(-sum(map(math.log, ratios)) / n, rel=1e-4)
    assert metrics["drift/k3"] == pytest.approx(
        sum(r - 1 - math.log(r) for r in ratios) / n, rel=1e-4
    )
    assert metrics["weight"] == pytest.approx(sum(min(r, 1) for r in ratios) / n, rel=1e-4)
    weights = [min(r, 1) for r in ratios]
    assert metrics["ess"] == pytest.approx(
        sum(weights) ** 2 / (n * sum(w * w for w in weights)), rel=1e-4
    )
    assert sum(v for name, v in metrics.items() if name.startswith("tokens/lag_")) == n


@pytest.mark.parametrize("algo", LOSSES)
def test_every_loss_has_its_stats_drift_and_effective_sample_size_in_each_lag_bucket(tied, algo):
    sequences = random_sequences(6)
    policy = load(make_config(tied, algo=algo, **wide_clip(algo)))
    seen, loss = [], policy.loss

    def record(inputs, *update):
        per_token_loss, stats = loss(inputs, *update)
        seen.append((inputs, stats))
        return per_token_loss, stats

    policy.loss = functools.update_wrapper(record, loss)
    metrics = policy.train_step([[bundle(sequences)]], policy_version=12)
    ((inputs, stats),) = seen
    lags = 12 - np.concatenate([s.policy_versions[s.loss_mask] for s in sequences])
    log_ratio = (inputs.logprobs.detach() - inputs.behavior_logprobs).double().numpy()
    k1, k3 = -log_ratio, np.exp(log_ratio) - 1 - log_ratio
    weight = stats.get("weight", stats["ratio"]).double().numpy()
    for bucket, first, last in (
        ("", 0, 99),
        ("/lag_1", 1, 1),
        ("/lag_5-8", 5, 8),
        ("/lag_9+", 9, 99),
    ):
        mine = (lags >= first) & (lags <= last)
        assert metrics[f"drift/k1{bucket}"] == pytest.approx(k1[mine].mean(), rel=1e-4)
        assert metrics[f"drift/k3{bucket}"] == pytest.approx(k3[mine].mean(), rel=1e-4)
        ess = weight[mine].sum() ** 2 / (mine.sum() * (weight[mine] ** 2).sum())
        assert metrics[f"ess{bucket}"] == pytest.approx(ess, rel=1e-4) and ess <= 1 + 1e-9
        for name, values in stats.items():
            assert metrics[f"{name}{bucket}"] == pytest.approx(
                values.numpy()[mine].mean(), rel=1e-4
            )


@pytest.mark.parametrize("minibatches", [1, 2])
def test_proximal_logprobs_are_those_of_the_step_s_start(tied, minibatches):
    sequences = random_sequences(8)
    updates = [sequences[: 8 // minibatches], sequences[8 // minibatches :]][:minibatches]
    policy = load(make_config(tied, minibatches=minibatches, lr=0.05, optim=OptimOptions(warmup=0)))
    at_start = [policy.score([update])[0] for update in updates]
    seen = []

    def record(inputs, *update):
        seen.append(inputs)
        return -inputs.advantages * inputs.logprobs, {}

    policy.loss = record
    policy.train_step([[bundle(update)] for update in updates], policy_version=12)
    for inputs, expected in zip(seen, at_start, strict=True):
        torch.testing.assert_close(inputs.proximal_logprobs, expected)
        assert not inputs.proximal_logprobs.requires_grad
    assert torch.allclose(seen[0].logprobs, seen[0].proximal_logprobs, atol=1e-5)
    if minibatches == 2:
        assert not torch.allclose(seen[1].logprobs, seen[1].proximal_logprobs, atol=1e-3)


def test_kl_penalty_is_zero_at_the_start_and_pulls_back_later(tied):
    sequences = random_sequences(6)
    ends = []
    for kl_coef in (1e-9, 10.0):
        policy = load(make_config(tied, kl_coef=kl_coef, algo="reinforce", algo_args=(), lr=3e-3))
        divergences = [policy.train_step(share_of(sequences), 12)["kl_ref"] for _ in range(8)]
        assert abs(divergences[0]) < 1e-6 and all(d >= 0 for d in divergences)
        ends.append(divergences[-1])
    assert ends[1] < ends[0] / 3


def test_loglinear_proximal_logprobs_interpolate_by_version_and_make_no_forward_pass_of_their_own(
    tied,
):
    sequences = random_sequences(12)
    updates = [sequences[:4], sequences[4:8], sequences[8:]]
    policy = load(
        make_config(
            tied, minibatches=3, proximal="loglinear", lr=0.05, optim=OptimOptions(warmup=0)
        )
    )
    seen, num_forwards, forward = [], [], policy.module.forward

    def record(inputs):
        seen.append(inputs)
        return -inputs.advantages * inputs.logprobs, {}

    def count(*args):
        num_forwards.append(1)
        return forward(*args)

    policy.loss, policy.module.forward = record, count
    policy.train_step([[bundle(update)] for update in updates], policy_version=12)
    assert len(num_forwards) == 3
    for i, (update, inputs) in enumerate(zip(updates, seen, strict=True)):
        versions = np.concatenate([s.policy_versions[s.loss_mask] for s in update])
        rows = zip(
            versions.tolist(),
            inputs.logprobs.tolist(),
            inputs.behavior_logprobs.tolist(),
            inputs.proximal_logprobs.tolist(),
            strict=True,
        )
        for version, current, behavior, proximal in rows:
            share = (12 - version) / (12 + i / 3 - version)
            assert proximal == pytest.approx(behavior + share * (current - behavior), rel=1e-5)
        assert not inputs.proximal_logprobs.requires_grad


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_the_kl_penalty_adds_the_estimator_s_own_gradient_to_that_of_the_loss(tied, kl_estimator):
    sequences = random_sequences(5)
    policy = load(make_config(tied, kl_coef=0.3, kl_estimator=kl_estimator))
    with torch.no_grad():  # another reference, or there would be nothing to pull at
        for parameter in policy.reference.parameters():
            parameter.mul_(0.9)
        ref_logprobs, *_ = policy._forward(policy.reference, pack(bundle(sequences), False))
    by_hand = load(make_config(tied))
    plain = by_hand.loss

    def with_penalty(inputs):
        per_token_loss, stats = plain(inputs)
        penalty = KL_ESTIMATORS[kl_estimator](
            inputs.logprobs, ref_logprobs, inputs.behavior_logprobs
        )
        return per_token_loss + 0.3 * penalty, {**stats, "kl_ref": penalty.detach()}

    by_hand.loss = with_penalty
    metrics, expected = (
        p.train_step([[bundle(sequences)]], policy_version=12) for p in (policy, by_hand)
    )
    assert abs(metrics["kl_ref"]) > 1e-3 and metrics == pytest.approx(expected, rel=1e-5)
    assert_same_gradient(first_gradient(policy), first_gradient(by_hand))


@pytest.mark.parametrize("field", ["advantage", "behavior_logprobs"])
def test_a_loss_that_is_not_finite_ends_the_run_and_touches_no_weight(tied, field):
    first, *rest = random_sequences(4)
    value = math.nan if field == "advantage" else np.full(len(first.tokens), math.nan, np.float32)
    policy = load(make_config(tied))
    before = {name: tensor.clone() for name, tensor in policy.named_full_parameters()}
    with pytest.raises(
        RuntimeError, match=r"loss nan and gradient norm nan at update 0 must be finite"
    ):
        policy.train_step(share_of([replace(first, **{field: value}), *rest]), policy_version=12)
    for name, tensor in policy.named_full_parameters():
        assert torch.equal(tensor, before[name])


def test_a_token_from_the_future_and_an_update_without_tokens_are_refused(tied):
    sequences = random_sequences(3)
    policy = load(make_config(tied))
    newest = max(int(s.policy_versions.max()) for s in sequences)
    with pytest.raises(
        RuntimeError,
        match=f"sampled by version {newest}, but the trainer is at version {newest - 1}",
    ):
        policy.train_step(share_of(sequences), policy_version=newest - 1)
    silent = [replace(s, loss_mask=np.zeros(len(s.tokens), bool)) for s in sequences]
    with pytest.raises(RuntimeError, match="no trained token"):
        policy.train_step(share_of(silent), policy_version=newest)


# Publishing and checkpoints


@pytest.mark.parametrize("tying", ["tied", "untied"])
def test_parameters_have_the_names_and_values_of_the_saved_model_each_once(tying, request):
    path = request.getfixturevalue(tying)
    policy = load(make_config(path))
    policy.score([random_sequences(2)])  # a forward pass must not leave gathered weights behind
    published = list(policy.named_full_parameters())
    saved = load_file(os.path.join(path, "model.safetensors"))
    assert sorted(name for name, _ in published) == sorted(saved)
    for name, tensor in published:
        assert torch.equal(tensor, saved[name])


@pytest.mark.parametrize("tying", ["tied", "untied"])
def test_a_saved_checkpoint_gives_the_same_logits_in_transformers(tying, request, tmp_path):
    path, saved = request.getfixturevalue(tying), str(tmp_path / "checkpoints" / "step_3")
    sequences = random_sequences(3)
    policy = load(make_config(path, lr=0.01))
    policy.train_step(share_of(sequences), policy_version=12)
    save_weights(policy, saved)
    scores = policy.score([sequences], raw=True)[0]
    torch.testing.assert_close(plain_logprobs(saved, sequences), scores, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain_logprobs(path, sequences), scores, atol=1e-3)
    assert (
        AutoTokenizer.from_pretrained(saved).get_vocab()
        == AutoTokenizer.from_pretrained(path).get_vocab()
    )
    assert AutoModelForCausalLM.from_pretrained(saved).config.architectures == ["Qwen3ForCausalLM"]
    assert os.listdir(tmp_path / "checkpoints") == ["step_3"]


def test_a_save_clears_what_a_killed_one_left(tied, tmp_path):
    (tmp_path / "step_1.tmp").mkdir()
    (tmp_path / "step_1.tmp" / "model.safetensors").write_text("half")
    save_weights(load(make_config(tied)), str(tmp_path / "step_1"))
    assert os.listdir(tmp_path) == ["step_1"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")


def test_a_full_disk_is_seen_before_writing_with_the_arithmetic(tied, tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        message = error_of(save_weights, load(make_config(tied)), str(tmp_path / "step_1"))
        assert message.startswith("OSError: checkpoint") and "\n" not in message
        assert f"needs 0.033 GB (0.001 of tensors + 0.032), 0.001 GB free in {tmp_path}" in message
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


class Interrupted:
    """What writes weights, and is stopped by a signal."""

    frozen = MappingProxyType({})

    def write(self, trained, folder):
        raise KeyboardInterrupt


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_folder(Interrupted(), {}, tmp_path / "step_1")
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_halfway_leaves_no_checkpoint_and_one_line(tied, tmp_path):
    saved = tmp_path / "checkpoints" / "step_1"
    assert run_ranks(save_with_a_file_size_limit, 1, tied, str(saved), str(tmp_path / "error")) == [
        0
    ]
    error = (tmp_path / "error").read_text()
    assert error.startswith("OSError: ") and "File too large" in error and "\n" not in error
    assert os.listdir(saved.parent) == []


def test_an_option_that_the_loss_does_not_take_is_refused_before_the_model_is_looked_for():
    with pytest.raises(ValueError, match=r"--algo-args clip_low=0.1: --algo reinforce takes none"):
        load(Config(model="/no/such/folder", algo="reinforce", algo_args=("clip_low=0.1",)))


def test_an_argument_that_the_loss_does_not_take_ends_the_job_before_it_makes_anything(tmp_path):
    from asyncrl.job.node import start_rank

    with (
        pytest.raises(
            ValueError,
            match=r"^--algo-args cap=2: --algo grpo takes clip_low, clip_high, dual_clip$",
        ),
        start_rank(
            Config(model="/no/such/folder", algo_args=("cap=2",), runs_dir=str(tmp_path / "runs"))
        ),
    ):
        pass
    assert not (tmp_path / "runs").exists()


def test_a_head_that_we_would_compute_wrongly_is_refused(tmp_path):
    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "head_dim": 8,
    }
    Gemma2ForCausalLM(
        Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"final_logit_softcapping = 30.0"):
        load(make_config(str(tmp_path)))
    Gemma3nConfig().save_pretrained(tmp_path / "with_parts")
    with pytest.raises(ValueError, match=r"final_logit_softcapping = 30.0"):
        load(make_config(str(tmp_path / "with_parts")))


def test_weights_that_a_folder_lacks_are_named_and_not_made_up(tied, tmp_path):
    path = shutil.copytree(tied, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down"] = weights.pop("model.layers.1.mlp.down_proj.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"its safetensors lack model.layers.1.mlp.down_proj.weight, which its config",
    ):
        load(make_config(str(path)))


def test_weights_of_another_vocabulary_are_refused_with_both_shapes(tied, tmp_path):
    path = shutil.copytree(tied, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    message = r"model.embed_tokens.weight is \[150, 64\] in its safetensors and \[200, 64\] by its config.json"
    with pytest.raises(ValueError, match=message):
        load(make_config(str(path)))


def test_a_loss_of_ones_own_makes_the_update_that_the_shipped_one_of_its_formula_makes(
    tied, tmp_path
):
    sequences, weights = random_sequences(9, seed=5), []
    own = f"{write_own(tmp_path, LOSS)}:loss", ("clip=0.3",)  # grpo's, with one clip
    for algo, algo_args in (("grpo", ("clip_low=0.3", "clip_high=0.3")), own):
        policy = load(make_config(tied, algo=algo, algo_args=algo_args))
        stats = policy.train_step(share_of(sequences), policy_version=12)
        weights.append({name: value.clone() for name, value in policy.named_full_parameters()})
        assert stats["grad_norm"] > 0
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    untouched = {
        name: value.clone() for name, value in load(make_config(tied)).named_full_parameters()
    }
    assert not all(torch.equal(untouched[name], weights[0][name]) for name in untouched)
