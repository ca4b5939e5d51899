"""A step of the policy is the step of the definition in tests/plain_trainer.py, however it is packed and sharded."""

import math
from collections import Counter
from dataclasses import replace

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import numpy as np
import pytest
import torch
import torch.distributed as dist
from host_waits import HostWaits
from plain_trainer import PlainTrainer, check_step, make_step, randomize, relative_error
from ranks import run_group
from tiny_families import LONG_PHI3
from tiny_policy import (
    VERSION,
    VOCAB,
    change_sharing,
    grouped_sequences,
    load,
    make_config,
    random_sequences,
    random_tree,
    save_tiny_family,
    weights_of,
    with_top_tokens,
)
from torch.utils._device import device_decorator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import asyncrl.trainer.model
from asyncrl.config import AdvantageOptions, OptimOptions
from asyncrl.trainer.families import COMPARED
from asyncrl.trainer.gae import estimate_step
from asyncrl.trainer.lag_stats import TokenStats
from asyncrl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("one_rank")
ALL_SAVED = ("layers", "head", "activations", "optimizer")
VALUES = {
    "advantage": "gae",
    "advantage_options": AdvantageOptions(
        gamma=0.99, lam=0.9, value_lam=0.8, value_coef=0.3, value_lr=4
    ),
}
THREE_UPDATES = {"algo": "decoupled_ppo", "algo_args": (), "minibatches": 3}
CASES = {
    "grpo": {"algo": "grpo", "algo_args": ("clip_low=0.5", "clip_high=3"), "kl_coef": 0.3, "kl_estimator": "unbiased"},
    "topr": {"algo": "topr", "kl_coef": 0.3, "loss_aggregation": "sequence_mean", "temperature": 0.7},
    "m2po": {"algo": "m2po", "kl_coef": 0.3, "kl_estimator": "k2", "loss_aggregation": "constant"},
    "values of adapters": {**VALUES, "lora_rank": 4, "kl_coef": 0.1, "minibatches": 2},
    "values, memory saved": {**VALUES, "save_memory": ALL_SAVED, "loss_aggregation": "constant"},
    "values as they are, clipped": {
        "advantage": "gae",
        "advantage_options": AdvantageOptions(whiten=False),
        "max_grad_norm": 0.01,
        "minibatches": 2,
        "optim": OptimOptions(scale_lr_by_ess=True),
    },
    "sampling and entropy": {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 12,
        "min_p": 0.01,
        "optim": OptimOptions(entropy_coef=0.5),
    },
    "interpolated proximal policy": {**THREE_UPDATES, "proximal": "loglinear"},
    "a user's loss": {"algo": f"{__file__}:loss_by_lag"},
    "centered": {"algo": "tis", "centering": True, "top_logprobs": 7, "temperature": 0.7},
    "epochs": {
        **THREE_UPDATES,
        "seed": 3,
        "steps": 20,
        "optim": OptimOptions(epochs=2, warmup_steps=3, lr_scheduler="linear"),
    },
}  # fmt: skip
"""Options of a step. Losses differ in what they see: token or sequence, rewards, the whole update, proximal policy."""
ON_DEVICE = ("grpo", "centered", "sampling and entropy", "epochs", "values as they are, clipped")
BALANCE = {"optim": OptimOptions(seq_aux_loss_coef=7)}
FAMILIES = {
    "qwen3_moe": ({}, {**BALANCE, "minibatches": 2}),
    "mixtral": ({}, {**BALANCE, "save_memory": ("activations",), "lora_rank": 3}),
    "gpt_oss": ({}, BALANCE),
    "qwen3_next": ({}, {**BALANCE, "save_memory": ("activations",)}),
    "gemma4_text": (
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        BALANCE,
    ),
    "phi3": (LONG_PHI3, {"minibatches": 2}),
    "hunyuan_v1_moe": ({"num_experts_per_tok": [2, 1], "moe_intermediate_size": [192, 192]}, BALANCE),
}  # fmt: skip
"""Options of a model of each of these families, with names and sizes of experts as published models have them, and of
a step."""

QUICK = ("gpt2", "opt", "qwen3_moe")
"""Families of a test of all families that every run of the tests has: two with dropout, and a mixture."""


def loss_by_lag(inputs):
    losses = -inputs.logprobs * inputs.advantages / (1 + inputs.lags)
    return losses, {"ratio": inputs.log_ratio.detach().exp()}


def minibatches_of(sequences, config):
    """The sequences, and one of which nothing is trained."""
    untrained = np.zeros_like(sequences[0].loss_mask)
    sequences = [*sequences, replace(sequences[0], loss_mask=untrained, oldest_version=None)]
    if config.top_logprobs:
        sequences = with_top_tokens(sequences, config.top_logprobs)
    return [sequences[i :: config.minibatches] for i in range(config.minibatches)]


def packed_sequences(position_ids):
    """What transformers' function of that name returns, without its question whether there is one sequence alone.

    It asks for the CPU's masks only; attention by bounds has none.
    """
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_an_update_makes_no_tensor_elsewhere_than_its_micro_batches_are_and_none_has_the_host_wait(
    untied, monkeypatch, name
):
    """What is made without `device=` is on another device here, as it would be beside micro-batches on a GPU.

    More micro-batches cost an update no more waits.
    """
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", packed_sequences)
    waits = HostWaits()

    elsewhere, host = torch.device("meta"), torch.device("cpu")
    for method in ("_make_update", "_with_initial_scores"):  # what is packed before is on the host
        changed = waits(device_decorator(elsewhere, getattr(Policy, method)))
        monkeypatch.setattr(Policy, method, changed)
    monkeypatch.setattr(
        "asyncrl.trainer.policy.estimate_step", device_decorator(elsewhere, estimate_step)
    )
    # counts, AdamW's count of steps and what is gathered of all ranks are the host's
    for owner, method in ((Policy, "_totals"), (Policy, "_step"), (TokenStats, "sequence_ess")):
        monkeypatch.setattr(owner, method, device_decorator(host, getattr(owner, method)))
    config = make_config(untied, **CASES[name])
    updates = minibatches_of(random_sequences(12, seed=3), config)
    names = []
    for budget in (40, 400):
        waits.names.clear()
        metrics, _ = make_step(load(config), updates, budget)
        assert all(map(math.isfinite, metrics.values()))
        names.append(sorted(waits.names))
    assert names[0] == names[1]


def load_random(config):
    """A policy of which all that is trained is random, and that reads trees by a mask."""
    policy = load(config)
    change_sharing(policy, attention_of_trees="sdpa")
    randomize(policy)
    return policy


@pytest.mark.parametrize("name", CASES)
def test_scores_and_a_step_are_those_of_the_definition_however_it_is_packed(
    untied, monkeypatch, name
):
    """By masks, and by the bounds of sequences, with micro-batches between that share prefixes and have a mask."""
    config = make_config(untied, **CASES[name])
    updates = minibatches_of(random_tree(12, seed=len(name)), config)
    policy = load_random(config)
    plain = PlainTrainer(policy)
    for part, scores in zip(updates, policy.logprobs_of(updates, raw=True), strict=True):
        raw = plain.read(part, raw=True)[0]
        torch.testing.assert_close(scores, raw.detach().float(), rtol=1e-4, atol=1e-5)
    expected = plain.train_step(updates)
    assert check_step(policy, updates, 40, expected) == 0
    monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: "varlen")
    policy = load_random(replace(config, share_prefix="tree"))
    assert check_step(policy, updates, 40, expected) > 0.2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_another_family_is_that_of_the_definition(family, tmp_path):
    """Some of the gradients are sums over many tokens, which round."""
    model_options, options = FAMILIES[family]
    config = make_config(save_tiny_family(family, str(tmp_path), **model_options), **options)
    updates = minibatches_of(random_sequences(9), config)
    check_step(load_random(config), updates, 40, relative=1e-4)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in COMPARED],
)
def test_to_save_memory_leaves_the_gradient_of_each_family_as_it_is(family, tmp_path):
    """Some families have dropout, which is off."""
    path = save_tiny_family(family, str(tmp_path), **FAMILIES.get(family, [{}])[0])
    updates, gradients = [random_sequences(5)], []
    for save_memory in ((), ALL_SAVED):
        _, (gradient,) = make_step(load(make_config(path, save_memory=save_memory)), updates, 40)
        gradients.append(gradient)
    assert relative_error(*gradients) < 1e-5


def test_no_pass_reads_weights_of_before_an_update(model):
    """Passes without gradients leave weights gathered, before the updates of a step and between two steps."""
    steps = []
    for save_memory in ((), ALL_SAVED[:2]):
        policy = load(make_config(model, save_memory=save_memory, **THREE_UPDATES))
        scores = []
        for version in range(2):
            updates = [grouped_sequences(3, 2, seed=9 * version + update) for update in range(3)]
            make_step(policy, updates, 40)
            scores += policy.logprobs_of([random_sequences(3)])
            scores += weights_of(policy).values()
        steps.append(scores)
    for kept, freed in zip(*steps, strict=True):
        assert torch.equal(kept, freed)


# Several ranks


ON_TWO_RANKS = {
    "ranks without sequences": {"algo": "m2po", "kl_coef": 0.1, "minibatches": 3},
    "adapters and values": {**VALUES, "lora_rank": 3, "kl_coef": 0.1, "minibatches": 2},
    "values of trees in epochs, offloaded": {
        **VALUES,
        "share_prefix": "tree",
        "loss_aggregation": "constant",
        "save_memory": ("optimizer",),
        "max_grad_norm": 0.01,
        "optim": OptimOptions(epochs=2),
    },
    "prompts, all saved": {
        "share_prefix": "prompt",
        "loss_aggregation": "sequence_mean",
        "save_memory": ALL_SAVED,
    },
    "centered": {"algo": "tis", "centering": True, "top_logprobs": 7},
    "replicas": {"replicas": 2, "algo": "m2po", "optim": OptimOptions(scale_lr_by_ess=True)},
    "untied": {"minibatches": 2},
    "untied, freed": {"minibatches": 2, "save_memory": ("layers", "head")},
}
"""Options of a step of 15 sequences in 5 groups, or of one sequence in each update."""


class Exchanged(TorchDispatchMode):
    """Counts what ranks exchange, by the name of the operation and the bytes of its first tensor."""

    names = ("_allgather_base", "all_gather_into", "allreduce", "_reduce_scatter_base")

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for name in self.names if "c10d" in function.namespace else ():
            if name in str(function):
                self.counts[name, next(tree_iter(args)).nbytes] += 1
        return function(*args, **(kwargs or {}))


def check_on_two_ranks(rank, models, names):
    """Make a step by each of these names, whose head runs in chunks of 7 rows, and gather weights to be sent."""
    exchanges = {}
    for name in names:
        print(name)
        options = ON_TWO_RANKS[name]
        config = make_config(models[name.startswith("untied")], **options)
        policy = load(config)
        randomize(policy)
        policy.module.chunk_rows = 7
        change_sharing(policy, cost=sum)  # as where attention takes bounds
        has_few = name == "ranks without sequences"
        updates = minibatches_of(
            random_sequences(3) if has_few else grouped_sequences(5, 3), config
        )
        expected = [PlainTrainer(policy)]
        if rank == 0:
            expected = [expected[0].train_step(updates)]
        dist.broadcast_object_list(expected)
        with Exchanged() as exchanged:
            saved_share = check_step(policy, updates, 40, *expected)
        assert (saved_share > 0.1) == (config.share_prefix != "off")
        exchanges[name] = exchanged.counts
    if "replicas" in names:
        check_sums_of_replicas(exchanges["replicas"])
        check_gathered(exchanges["untied"], exchanges["untied, freed"])
        for lora_rank in (0, 4):
            check_sent(load(make_config(models[0], dtype="bfloat16", lora_rank=lora_rank)))


def check_sums_of_replicas(counts):
    """Replicas sum their gradients once for all micro-batches, each of two layers and what is around them by itself."""
    # small ones are sums of metrics
    sums = [num for (kind, size), num in counts.items() if kind == "allreduce" and size > 4000]
    assert sum(sums) == 3


def check_gathered(kept, freed):
    """All weights are gathered once an update, or to save memory in each pass over a micro-batch.

    Gradients of embedding and head are reduced as often, those of layers in each micro-batch. The first update begins
    with what the pass for proximal log-probs has gathered.
    """
    embedding, head = 4 * VOCAB * 64, 4 * (VOCAB * 64 + 64)  # with the last norm
    gather, reduce = "_allgather_base", "_reduce_scatter_base"
    num_microbatches = freed[reduce, embedding // 2]
    assert num_microbatches > 2, "the updates"
    root = Counter({(gather, embedding + head): 2, (reduce, (embedding + head) // 2): 2})
    parts = Counter(
        {
            (gather, embedding): 3 * num_microbatches,
            (reduce, embedding // 2): num_microbatches,
            (gather, head): num_microbatches,
            (reduce, head // 2): num_microbatches,
        }
    )
    assert root <= kept and parts <= freed
    layers_kept, layers_freed = kept - root, freed - parts
    (layer,) = {key for key in layers_kept if key[0] == gather}
    assert layers_kept.pop(layer) == 2 * 2, "layers, updates"
    assert layers_freed.pop(layer) == 2 * 3 * num_microbatches, "layers, passes"
    assert layers_kept == layers_freed


def check_sent(policy):
    """Weights are cast to what is sent before they are gathered, and adapters merged in float32."""
    randomize(policy)
    with Exchanged() as exchanged:
        sent = {name: tensor.clone() for name, tensor in policy.sent_parameters()}
    full = weights_of(policy)
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    assert all(torch.equal(sent[key], tensor.bfloat16()) for key, tensor in full.items())
    if policy.config.lora_rank:
        merged = full["model.layers.0.mlp.up_proj.weight"]
        assert not torch.equal(merged, merged.bfloat16().float())
    else:
        num_bytes = sum(size * count for (_, size), count in exchanged.counts.items())
        assert num_bytes == sum(tensor.nbytes for tensor in sent.values()) / 2, "of a rank"


@pytest.mark.parametrize(
    "are_shared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["apart", "shared"]
)
def test_two_ranks_make_the_steps_of_the_definition_and_exchange_no_more_than_they_must(
    model, untied, are_shared
):
    """Prefixes are shared on one rank in the tests above, and on two in the slow one."""
    names = [name for name, row in ON_TWO_RANKS.items() if ("share_prefix" in row) == are_shared]
    run_group(check_on_two_ranks, 2, (model, untied), names)


# What a step does besides


@pytest.mark.parametrize(
    ("options", "num_passes"),
    [
        ({"algo": "decoupled_ppo"}, 1),
        ({"algo": "m2po"}, 2),
        ({"algo": "decoupled_ppo", "optim": OptimOptions(epochs=2)}, 3),
        ({"algo": "decoupled_ppo", "optim": OptimOptions(epochs=2), "proximal": "loglinear"}, 2),
    ],
)
def test_a_step_reads_no_sequence_more_often_than_its_loss_needs(model, options, num_passes):
    """The trainer's clock is told when each optimizer step begins and ends."""
    policy, passes, entered = load(make_config(model, **options)), [], []
    policy.module.model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    policy.clock.enter = lambda state: entered.append((state, policy.num_updates))
    policy.train_step([[random_sequences(3)]], VERSION)
    assert len(passes) == num_passes
    assert entered[::2] == [("forward_backward", n) for n in range(policy.num_updates + 1)]
    assert entered[1::2] == [("optimizer", n) for n in range(policy.num_updates)]


SEQUENCES = random_sequences(3)
FIRST, NUM_TOKENS = SEQUENCES[0], len(SEQUENCES[0].tokens)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"advantage": np.nan}, "loss nan and gradient norm nan at update 0 must be finite"),
        (
            {"behavior_logprobs": np.full(NUM_TOKENS, np.nan, np.float32)},
            "loss nan and gradient norm nan at update 0 must be finite",
        ),
        (
            {"policy_versions": np.full(NUM_TOKENS, 12, np.int32)},
            "sampled by version 12, but the trainer is at version 11",
        ),
        ({"loss_mask": np.zeros(NUM_TOKENS, bool)}, "an update got no trained token on any rank"),
    ],
)
def test_what_cannot_be_trained_ends_the_run_and_touches_no_weight(model, changes, line):
    policy = load(make_config(model))
    before = weights_of(policy)
    others = [] if "loss_mask" in changes else SEQUENCES[1:]
    with pytest.raises(RuntimeError, match=line):
        policy.train_step([[[replace(FIRST, **changes), *others]]], VERSION)
    torch.testing.assert_close(weights_of(policy), before, rtol=0, atol=0)
