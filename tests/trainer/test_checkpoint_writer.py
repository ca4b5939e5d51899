"""The trainer's part of a checkpoint: to the bit for as many ranks, and close for others; and weights for people."""

import itertools
import json
import os
import re
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plain_trainer import randomize
from ranks import run_group
from safetensors.torch import load_file
from tiny_policy import (
    error_of,
    load,
    make_config,
    random_sequences,
    save_tiny_family,
    weights_of,
)
from transformers import AutoModelForCausalLM
from user_files import write_user_code

from asyncrl.cluster.processes import Interrupted
from asyncrl.config import OptimOptions
from asyncrl.runlog.manifest import NodeFacts, list_checkpoints
from asyncrl.trainer.checkpoint_writer import (
    LeaderPart,
    check_finite,
    make_state_copier,
    restore_training_state,
    training_state,
    write_checkpoint,
    write_shards,
)
from asyncrl.trainer.sharding import gather
from asyncrl.trainer.splitting import distribute
from asyncrl.trainer.weight_files import WeightWriter, save_weights

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = 4
RANK = 3
MOMENTUM = OptimOptions(warmup_steps=8, args=("momentum=0.9",))
VARIANTS = {
    # one row: all ranks but one have nothing of lora_A
    "lora with a value head": {"advantage": "gae", "lora_rank": 1, "minibatches": 2},
    "two replicas": {"replicas": 2},
    "offloaded sgd with a value head": {
        "optimizer": "sgd",
        "optim": MOMENTUM,
        "advantage": "gae",
        "save_memory": ("optimizer",),
    },
    "adam": {"optimizer": "adam", "optim": OptimOptions(warmup_steps=8, args=("amsgrad=true",))},
    "own": {"optimizer": "own"},
    "adafactor": {"optimizer": "adafactor", "advantage": "gae", "save_memory": ("optimizer",)},
}
ON_TWO_RANKS = [name for name in VARIANTS if name != "adafactor"]
OWN_OPTIMIZER = """
import torch


class Own(torch.optim.Optimizer):
    # State of another dtype and of another shape; numbers, None and text; what updates change of the group.

    def __init__(self, params, lr: float, momentum: float = 0.5):
        super().__init__(params, {"lr": lr, "momentum": momentum, "count": 0, "seen": [0.0]})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["seen"][0] += 0.1
            group["momentum"] *= 0.9
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter, dtype=torch.float16)
                    rows = parameter.sum(dim=-1) if parameter.ndim > 1 else parameter
                    state["rows"] = torch.zeros_like(rows)
                    state["share"] = torch.tensor(1.0, dtype=torch.float64)
                    state["step"], state["nothing"], state["text"] = 0, None, ""
                state["step"] += 1
                state["share"] *= 0.9
                state["text"] += "a"
                state["average"].lerp_(parameter.grad.half(), 1 - group["momentum"])
                if parameter.ndim > 1:
                    state["rows"].add_(parameter.grad.sum(dim=-1))
                    direction = state["average"].float() + state["rows"].unsqueeze(-1) / 100
                else:
                    direction = state["average"].float()
                size = group["seen"][0] / (group["count"] + state["step"] + len(state["text"])) * float(state["share"])
                parameter.sub_(direction, alpha=group["lr"] * size * 20)
"""
"""An optimizer of the user's own, with all that torch lets it keep; each of these changes what it does."""

PLAIN_STATE = """
import torch


class Plain(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["part"] = torch.ones(2)
        super().step(closure)
"""


def config_of(model, folder, name):
    """The config of one of VARIANTS."""
    fixed = {"algo": "reinforce", "optimizer": "adamw", "lr": 0.01}
    fixed |= {"optim": OptimOptions(warmup_steps=8)} | VARIANTS[name]
    if name == "own":
        fixed["optimizer"] = f"{write_user_code(folder, OWN_OPTIMIZER)}:Own"
    return make_config(model, **fixed)


def train(policy, steps) -> list[dict]:
    """Steps on batches that depend on the step alone; what each measured."""
    measured = []
    for step in steps:
        num_updates = policy.config.minibatches
        updates = [random_sequences(4, seed=10 * step + number) for number in range(num_updates)]
        share = distribute(updates, dist.get_world_size(), 60)[dist.get_rank()]
        metrics = policy.train_step(share, policy_version=12)
        measured.append(metrics | {"random": torch.rand(()).item()})
    return measured


def train_to_the_end(rank, folder, configs, resumes) -> dict:
    """Train by each config, and save in the middle; or continue from there with new policies. Return how they ended."""
    group = dist.new_group(backend="gloo")
    torch.manual_seed(77 if resumes else rank)
    ends = {}
    for name, config in configs.items():
        policy, part = load(config), os.path.join(folder, name)
        if resumes:
            restore_training_state(policy, part, group)
        else:
            train(policy, range(2))
            staged = make_state_copier(policy.device).stage(training_state(policy))
        middle, measured = weights_of(policy), train(policy, range(2, STEPS))
        if not resumes:
            # after training, as copies do not change
            write_shards(staged, part, group)
        ends[name] = SimpleNamespace(
            middle=middle,
            measured=measured,
            weights=weights_of(policy),
            num_updates=policy.num_updates,
        )
    return ends


def save_and_continue(rank, folder, configs) -> list[dict]:
    return [train_to_the_end(rank, folder, configs, resumes) for resumes in (False, True)]


def run(num_ranks, body, *args):
    """What rank 0 of so many returns; one rank is this process."""
    return body(0, *args) if num_ranks == 1 else run_group(body, num_ranks, *args)[0]


@pytest.mark.parametrize(
    ("saved_by", "continued_by", "names"),
    [
        (1, 1, ["offloaded sgd with a value head", "adam", "own", "adafactor"]),
        (2, 1, ["lora with a value head", "own"]),
        pytest.param(2, 4, ON_TWO_RANKS, marks=pytest.mark.slow),
    ],
)
def test_training_continues_to_the_bit_on_as_many_ranks_and_closely_on_others(
    tmp_path, model, saved_by, continued_by, names
):
    """Nothing in the shards is pickled."""
    configs = {name: config_of(model, tmp_path / "code", name) for name in names}
    folder = tmp_path / "checkpoints"
    unbroken, as_many = run(saved_by, save_and_continue, str(folder), configs)
    for path in folder.glob("*/*"):
        assert path.suffix == ".safetensors" and load_file(path)
    for name in names:
        check_resumed(unbroken[name], as_many[name], is_equal=True)
    if continued_by != saved_by:
        others = run(continued_by, train_to_the_end, str(folder), configs, True)
        for name in names:
            check_resumed(unbroken[name], others[name], is_equal=False)


def check_resumed(unbroken, resumed, is_equal) -> None:
    """What was trained after the checkpoint is what the unbroken training made."""
    # warm-up begins anew where what was restored is ignored
    assert resumed.num_updates == unbroken.num_updates
    torch.testing.assert_close(resumed.middle, unbroken.middle, rtol=1e-6, atol=1e-6)
    assert any(
        not torch.equal(unbroken.weights[name], weight) for name, weight in unbroken.middle.items()
    )
    if is_equal:
        assert resumed.measured == unbroken.measured
    tolerance = 0 if is_equal else 1e-3
    torch.testing.assert_close(resumed.weights, unbroken.weights, rtol=tolerance, atol=tolerance)


# What is refused, and what fails


def test_an_optimizer_continues_with_its_new_options_and_state_of_another_is_refused_by_name(
    tmp_path, model
):
    """job/test_checkpoints.py has another model."""
    group, config = dist.new_group(backend="gloo"), make_config(model, optim=MOMENTUM)
    policy = load(config)
    train(policy, range(2))
    write_shards(training_state(policy), str(tmp_path), group)
    items = ("momentum=0.9", "weight_decay=0.5")
    decayed = load(replace(config, optim=OptimOptions(warmup_steps=8, args=items)))
    restore_training_state(decayed, str(tmp_path), group)
    (options,) = decayed.optimizer.param_groups
    assert (options["weight_decay"], options["momentum"]) == (0.5, 0.9)
    line = r"has optimizer.momentum_buffer.model.embed_tokens.weight of \(150, 64\), the run's is None: "
    with pytest.raises(ValueError, match=line):
        restore_training_state(load(make_config(model)), str(tmp_path), group)


def test_a_signal_while_shards_are_read_is_no_failure_to_read_them(tmp_path, model, monkeypatch):
    def interrupt(*_):
        raise Interrupted("stopped by SIGTERM", 143)

    group, policy = dist.new_group(backend="gloo"), load(make_config(model))
    write_shards(training_state(policy), str(tmp_path), group)
    monkeypatch.setattr(dcp.HuggingFaceStorageReader, "read_data", interrupt)
    with pytest.raises(Interrupted):
        restore_training_state(policy, str(tmp_path), group)


def limit_file_size(num_bytes: int) -> None:
    """Have this process write no longer files."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def fail_on_two_ranks(rank, folder, model, plain_optimizer) -> dict[str, str]:
    """Return the error that this rank meets in each of several ways to fail."""
    group = dist.new_group(backend="gloo")
    errors = {"adafactor": error_of(load, make_config(model, optimizer="adafactor"))}
    policy = load(make_config(model, optimizer=plain_optimizer))
    train(policy, range(1))
    errors["plain state"] = error_of(training_state, policy)
    policy = load(make_config(model))
    save_weights(policy, os.path.join(folder, "saved"))
    errors["exists"] = error_of(save_weights, policy, os.path.join(folder, "saved"))
    broken = replace(random_sequences(1)[0], advantage=float("nan"))
    share = [[[broken]]] if rank == 0 else [[]]
    errors["not finite"] = error_of(policy.train_step, share, 12)
    run = SimpleNamespace(run_id="a" * 16, flush=lambda: None)
    leader_part = (
        LeaderPart(0, run, {"groups": []}, [NodeFacts({}, {}, "")], {}) if rank == 0 else None
    )
    checkpoint = training_state(policy), leader_part, WeightWriter(policy), group
    write_checkpoint(Path(folder, "step_1"), *checkpoint)
    if rank == 1:
        limit_file_size(10_000)
    errors["shards"] = error_of(write_checkpoint, Path(folder, "step_2"), *checkpoint)
    limit_file_size(10_000)
    errors["weights"] = error_of(save_weights, policy, os.path.join(folder, "full"))
    return errors


def test_what_one_of_two_ranks_cannot_do_both_know_in_one_line(tmp_path, model):
    plain = f"{write_user_code(tmp_path, PLAIN_STATE)}:Plain"
    lines = {
        "adafactor": "ValueError: --optimizer adafactor: it trains on one rank only, because it needs norms .+",
        "plain state": "ValueError: --optimizer keeps part..+ a scalar that is equal on all ranks",
        "exists": "OSError: .+ exists already",
        "not finite": "NotFinite: loss nan .+",
        "shards": "OSError: .+step_2 was not written: rank 1: .+ File too large.*",
        "weights": "OSError: .+ File too large.*",
    }
    for errors in run_group(fail_on_two_ranks, 2, str(tmp_path), model, plain):
        assert all(re.fullmatch(line, errors[name]) for name, line in lines.items()), errors
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {"saved", "step_1"}
    names = {path.name for path in list_checkpoints(tmp_path)[0].rglob("*.*")}
    shards = {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    assert names >= shards | {"node_0.msgpack", "manifest.json", "model.safetensors"}
    load(make_config(str(tmp_path / "saved")))


def test_what_is_not_finite_is_never_saved_over_a_good_checkpoint():
    good = {"weights.a": torch.ones(3), "step": torch.tensor(4)}
    message = r"^weights.b is not finite; the checkpoints before it are kept$"
    for bad in (float("nan"), float("-inf")):
        with pytest.raises(OSError, match=message):
            check_finite(good | {"weights.b": torch.tensor([0.0, bad])})


# Weights for people


@pytest.mark.parametrize(
    ("family", "is_tied", "options"),
    [
        ("qwen3", False, {"advantage": "gae"}),
        ("qwen3", True, {"lora_rank": RANK}),
        ("mixtral", False, {"advantage": "gae", "lora_rank": RANK}),
    ],
)
def test_a_saved_checkpoint_is_a_plain_model_with_the_scores_of_the_policy(
    tmp_path, family, is_tied, options
):
    """Merged, or with its adapter on the base. A value head is beside the model, and no engine is sent it."""
    path = save_tiny_family(family, str(tmp_path / "model"), tie_word_embeddings=is_tied)
    folder, sequences = tmp_path / "checkpoints" / "step_3", random_sequences(3)
    policy = load(make_config(path, **options))
    randomize(policy)
    policy.train_step([[sequences]], policy_version=12)
    left_by_a_save_that_was_killed = tmp_path / "checkpoints" / "step_3.tmp" / "half"
    left_by_a_save_that_was_killed.mkdir(parents=True)
    sent = [name for name, _ in policy.sent_parameters()]
    save_weights(policy, str(folder))
    scores = policy.logprobs_of([sequences], raw=True)[0]
    folders = [str(folder)]
    if policy.config.lora_rank:
        folders.append(str(tmp_path / "by_hand"))
        add_by_the_rules_of_peft(path, folder / "adapter", folders[1])
    for saved in folders:
        found = load(make_config(saved)).logprobs_of([sequences], raw=True)[0]
        torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-4)
    names = load_file(folder / "model.safetensors").keys()
    assert names == load_file(os.path.join(path, "model.safetensors")).keys()
    assert sorted(names) == sorted(sent)
    assert sent == [spec.name for spec in policy.sent_specs()]
    assert os.listdir(folder.parent) == ["step_3"] and not (folder / "half").exists()
    assert (folder / "tokenizer.json").exists()
    if "advantage" in options:
        head = load_file(folder / "value_head" / "value_head.safetensors")["value_head.weight"]
        assert torch.equal(head, gather(policy.module.value_head.weight))


def add_by_the_rules_of_peft(base, adapter, path):
    """Add the adapter in the two files of peft to the base model, and save that."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    expected = {"peft_type": "LORA", "r": RANK, "base_model_name_or_path": base}
    assert expected.items() <= config.items()
    full = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, module in full.named_modules():
            if name.split(".")[-1] in config["target_modules"]:
                prefix = f"base_model.model.{name}"
                a, b = (tensors.pop(f"{prefix}.lora_{letter}.weight") for letter in "AB")
                assert a.shape[0] == b.shape[1] == config["r"]
                module.weight += config["lora_alpha"] / config["r"] * b @ a
    assert not tensors, "tensors that belong to no target module"
    full.save_pretrained(path)


def test_a_rank_trains_while_its_shards_are_written(tmp_path, one_rank):
    """The longest pause of another thread is a small part of the time, so nothing keeps Python's lock."""
    state = {"weights": torch.zeros(100_000_000)}
    group = dist.new_group(backend="gloo")
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write_shards, state, str(tmp_path), group)
        moments = [begun]
        while not writing.done():
            time.sleep(0.001)
            moments.append(time.monotonic())
        writing.result()
    longest_s = max(end - start for start, end in itertools.pairwise(moments))
    assert longest_s < max(0.15, (moments[-1] - begun) / 4)
