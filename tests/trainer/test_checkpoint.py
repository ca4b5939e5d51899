"""The trainer's part of a checkpoint, by real gloo ranks: to the bit for as many ranks, and close for others."""

import os
import pathlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_policy import error_of, load, random_sequences, save_tiny_model
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.checkpoint import (
    WeightWriter,
    check_finite,
    differing_names,
    file_numbers,
    make_stager,
    read_trained,
    reason_of,
    restore_training_state,
    training_state,
)

BUDGET, STEPS = 60, 5
VARIANTS = {
    "whole": {},
    "lora": {"lora_rank": 1},  # one row: all ranks but one have nothing of lora_A
    "offloaded": {"save_memory": ("optimizer",)},
    "activations": {"save_memory": ("activations",)},
    "two replicas": {"replicas": 2},
    "minibatches": {"minibatches": 2},
    "value head": {"advantage": "gae", "minibatches": 2},
    "lora with a value head": {"advantage": "gae", "lora_rank": 1},
    "sgd": {"optimizer": "sgd", "optim": OptimOptions(warmup=8, args=("momentum=0.9",))},
    "sgd with a value head": {
        "optimizer": "sgd",
        "optim": OptimOptions(warmup=8, args=("momentum=0.9",)),
        "advantage": "gae",
    },
    "offloaded sgd": {
        "optimizer": "sgd",
        "optim": OptimOptions(args=("momentum=0.9",)),
        "save_memory": ("optimizer",),
    },
    "adam": {"optimizer": "adam", "optim": OptimOptions(warmup=8, args=("amsgrad=true",))},
    "rmsprop": {
        "optimizer": "rmsprop",
        "optim": OptimOptions(
            warmup=8,
            args=(
                "momentum=0.9",
                "centered=true",
            ),
        ),
    },
    "own": {"optimizer": "own_optimizer.py:Own"},
}
ON_ONE_RANK = {
    "adafactor": {"optimizer": "adafactor", "advantage": "gae"},
    "offloaded adafactor": {"optimizer": "adafactor", "save_memory": ("optimizer",)},
    "adafactor of adapters": {"optimizer": "adafactor", "lora_rank": 1},
}
OPTIMIZERS = ("sgd", "adam", "rmsprop", "own")
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("model")))


def make_config(model: str, **options) -> Config:
    fixed = {
        "algo": "reinforce",
        "lr": 0.01,
        "optim": OptimOptions(warmup=8),
        "max_tokens_per_microbatch": BUDGET,
    }
    if options.get("optimizer") == "own_optimizer.py:Own":
        pathlib.Path(model, "own_optimizer.py").write_text(OWN_OPTIMIZER)
        options |= {"optimizer": os.path.join(model, "own_optimizer.py:Own")}
    return Config(model=model, **fixed | options)


def train(policy, steps, rank: int, num_ranks: int) -> list[dict]:
    """Steps on batches that depend on the step alone; what each measured."""
    measured = []
    for step in steps:
        updates = [
            random_sequences(6, seed=10 * step + i) for i in range(policy.config.minibatches)
        ]
        share = distribute(updates, num_ranks, BUDGET)[rank]
        measured.append(
            policy.train_step(share, policy_version=12) | {"random": torch.rand(()).item()}
        )
    return measured


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_full_parameters()}


def rank_of(rank: int, folder: str, name: str, num_ranks: int) -> dist.ProcessGroup:
    """Join the other ranks; returns a gloo group of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = dist.FileStore(os.path.join(folder, f"store {name}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    return dist.new_group(backend="gloo")


def write_shards(state: dict[str, torch.Tensor], folder: str, group: dist.ProcessGroup) -> None:
    """Write this rank's part of a state as a checkpoint does. Raises OSError."""
    numbers = file_numbers(state, dist.get_world_size(group))
    storage = dcp.HuggingFaceStorageWriter(folder, numbers, save_distributed=True)
    try:
        dcp.save(state, storage_writer=storage, process_group=group)
    except CheckpointException as error:
        raise OSError(reason_of(error)) from None


def train_and_save(rank: int, folder: str, configs: dict[str, Config], num_ranks: int) -> None:
    """For each config train on, having saved in the middle from copies made there; rank 0 keeps how it ended."""
    group = rank_of(rank, folder, "save", num_ranks)
    for name, config in configs.items():
        policy = load(config)
        train(policy, range(2), rank, num_ranks)
        staged = make_stager(policy.device).stage(training_state(policy))
        # before it is written: copies do not change
        measured = train(policy, range(2, STEPS), rank, num_ranks)
        part = os.path.join(folder, name, "resume")
        write_shards(staged, part, group)
        writer, weights = WeightWriter(policy), weights_of(policy)
        if rank == 0:
            torch.save((measured, weights), os.path.join(folder, name, "unbroken.pt"))
            people = pathlib.Path(folder, name, "people")
            people.mkdir()
            writer.write(read_trained(part), people)
    dist.destroy_process_group()


def load_and_train(rank: int, folder: str, configs: dict[str, Config], num_ranks: int) -> None:
    """Go on in new processes; rank 0 keeps how it began and ended."""
    group = rank_of(rank, folder, f"load {num_ranks}", num_ranks)
    for name, config in configs.items():
        policy = load(config)
        torch.manual_seed(77)
        restore_training_state(policy, os.path.join(folder, name, "resume"), group)
        began = weights_of(policy)
        found = (
            train(policy, range(2, STEPS), rank, num_ranks),
            weights_of(policy),
            began,
            policy.num_updates,
        )
        if rank == 0:
            torch.save(found, os.path.join(folder, name, f"resumed on {num_ranks}.pt"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("saved_by", "variants"),
    [
        (1, ["whole", *OPTIMIZERS]),
        (2, ["lora"]),
        pytest.param(1, ["lora"], marks=pytest.mark.slow),
        pytest.param(2, list(VARIANTS), marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_to_the_bit_on_as_many_ranks_and_closely_on_others(
    tmp_path, model, saved_by, variants
):
    configs = {name: make_config(model, **VARIANTS[name]) for name in variants}
    assert run_ranks(train_and_save, saved_by, str(tmp_path), configs, saved_by) == [0] * saved_by
    for num_ranks in (1, 2, 4):
        possible = {
            name: config for name, config in configs.items() if num_ranks % config.replicas == 0
        }
        assert (
            run_ranks(load_and_train, num_ranks, str(tmp_path), possible, num_ranks)
            == [0] * num_ranks
        )
        for name, config in possible.items():
            assert_goes_on(tmp_path / name, config, num_ranks, is_equal=num_ranks == saved_by)


def assert_goes_on(folder: pathlib.Path, config: Config, num_ranks: int, is_equal: bool) -> None:
    """What was trained by so many ranks after the checkpoint is what the unbroken training made."""
    unbroken, weights = torch.load(folder / "unbroken.pt")
    measured, ended, began, num_updates = torch.load(folder / f"resumed on {num_ranks}.pt")
    assert num_updates == STEPS * config.minibatches, (
        "warm-up begins anew where what was restored is ignored"
    )
    for_people = load_file(folder / "people" / "model.safetensors")
    assert (folder / "people" / "value_head" / "value_head.safetensors").exists() == (
        config.advantage == "gae"
    )
    assert began.keys() == for_people.keys() == weights.keys()
    assert any(not torch.equal(weights[name], tensor) for name, tensor in began.items()), (
        "training moved nothing"
    )
    for name, tensor in began.items():
        torch.testing.assert_close(for_people[name], tensor, rtol=1e-6, atol=1e-6)
    if is_equal:
        assert measured == unbroken
        assert all(torch.equal(ended[name], tensor) for name, tensor in weights.items())
    for ours, theirs in zip(measured, unbroken, strict=True):
        assert ours["lr"] == theirs["lr"] and ours["grad_norm"] == pytest.approx(
            theirs["grad_norm"], rel=1e-3
        )
    for name, tensor in weights.items():
        torch.testing.assert_close(ended[name], tensor, rtol=1e-3, atol=1e-3)


def load_refused(rank: int, folder: str, config: Config) -> None:
    rank_of(rank, folder, "refused", 2)
    pathlib.Path(folder, f"error {rank}").write_text(error_of(load, config))
    dist.destroy_process_group()


def test_adafactor_goes_on_to_the_bit_on_one_rank_and_is_refused_on_two(tmp_path, model):
    configs = {name: make_config(model, **options) for name, options in ON_ONE_RANK.items()}
    assert run_ranks(train_and_save, 1, str(tmp_path), configs, 1) == [0]
    assert run_ranks(load_and_train, 1, str(tmp_path), configs, 1) == [0]
    for name, config in configs.items():
        assert_goes_on(tmp_path / name, config, 1, is_equal=True)
    assert run_ranks(load_refused, 2, str(tmp_path), configs["adafactor"]) == [0, 0]
    allowed = (
        "it trains on one rank alone, as it needs norms of whole weights; use one rank, or adamw"
    )
    for rank in (0, 1):
        assert (
            tmp_path / f"error {rank}"
        ).read_text() == f"ValueError: --optimizer adafactor: {allowed}"


def resume_with_other_options(rank: int, folder: str, config: Config) -> None:
    """Save before the first update and after two; go on from both with other options of the optimizer."""
    group = rank_of(rank, folder, "options", 1)
    policy = load(config)
    for name in ("begun", "trained"):
        write_shards(
            make_stager(policy.device).stage(training_state(policy)),
            os.path.join(folder, name),
            group,
        )
        train(policy, range(2), rank, 1)
    for name in ("begun", "trained"):
        decayed = load(
            replace(
                config,
                optim=OptimOptions(
                    warmup=8,
                    args=(
                        "momentum=0.9",
                        "weight_decay=0.5",
                    ),
                ),
            )
        )
        restore_training_state(decayed, os.path.join(folder, name), group)
        (options,) = decayed.optimizer.param_groups
        assert (options["weight_decay"], options["momentum"]) == (0.5, 0.9)
        assert bool(decayed.optimizer.state) == (decayed.num_updates > 0) == (name == "trained")
    plain = load(replace(config, optim=OptimOptions(warmup=8)))
    pathlib.Path(folder, "error").write_text(
        error_of(restore_training_state, plain, os.path.join(folder, "trained"), group)
    )
    dist.destroy_process_group()


def test_an_optimizer_goes_on_with_its_new_options_unless_they_leave_state_without_a_use(
    tmp_path, model
):
    config = make_config(model, **VARIANTS["sgd"])
    assert run_ranks(resume_with_other_options, 1, str(tmp_path), config) == [0]
    error = (tmp_path / "error").read_text()
    assert (
        "has optimizer.momentum_buffer.model.embed_tokens.weight of (150, 64), the run's is None: it is of"
        in error
    )


PLAIN_STATE = """
import torch


class Plain(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["part"] = torch.ones(2)
        super().step(closure)
"""


def save_plain_state(rank: int, folder: str, config: Config) -> None:
    rank_of(rank, folder, "plain", 2)
    policy = load(config)
    train(policy, range(1), rank, 2)
    pathlib.Path(folder, f"error {rank}").write_text(error_of(training_state, policy))
    dist.destroy_process_group()


def test_state_that_each_rank_may_have_for_itself_is_refused(tmp_path, model):
    (tmp_path / "plain.py").write_text(PLAIN_STATE)
    config = make_config(model, optimizer=f"{tmp_path}/plain.py:Plain")
    assert run_ranks(save_plain_state, 2, str(tmp_path), config) == [0, 0]
    error = (tmp_path / "error 1").read_text()
    assert (
        error.startswith("ValueError: --optimizer keeps part.")
        and "a scalar that is equal on all ranks" in error
    )


def test_nothing_in_the_shards_is_pickled(tmp_path, model):
    assert run_ranks(train_and_save, 2, str(tmp_path), {"one": make_config(model)}, 2) == [0, 0]
    for path in (tmp_path / "one" / "resume").iterdir():
        assert path.suffix == ".safetensors"
        load_file(path)


def load_another(rank: int, folder: str, config: Config) -> None:
    group = rank_of(rank, folder, "another", 1)
    pathlib.Path(folder, "error").write_text(
        error_of(restore_training_state, load(config), os.path.join(folder, "one", "resume"), group)
    )
    dist.destroy_process_group()


def test_shards_of_another_model_are_refused_by_name(tmp_path, model):
    assert run_ranks(
        train_and_save, 1, str(tmp_path), {"one": make_config(model, lora_rank=2)}, 1
    ) == [0]
    assert run_ranks(load_another, 1, str(tmp_path), make_config(model, lora_rank=3)) == [0]
    error = (tmp_path / "error").read_text()
    assert (
        error.startswith("ValueError: ")
        and "lora_A of (2, " in error
        and "the run's is (3, " in error
    )


def save_to_a_full_disk(rank: int, folder: str, config: Config) -> None:
    import resource
    import signal

    group = rank_of(rank, folder, "full", 2)
    policy = load(config)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    error = error_of(write_shards, training_state(policy), os.path.join(folder, "resume"), group)
    pathlib.Path(folder, f"error {rank}").write_text(error) if rank == 0 else None
    if rank == 1:
        assert error.startswith("OSError: rank 1: ") and "File too large" in error
    dist.destroy_process_group()


def test_a_rank_that_cannot_write_is_known_to_all_in_one_line(tmp_path, model):
    assert run_ranks(save_to_a_full_disk, 2, str(tmp_path), make_config(model)) == [0, 0]
    error = (tmp_path / "error 0").read_text()
    assert error.startswith("OSError: rank 1: ") and "File too large" in error and "\n" not in error


def test_tensors_that_checkpoints_have_otherwise_than_the_model_are_named(tmp_path, model):
    read = load_file(os.path.join(model, "model.safetensors"))
    assert differing_names(model, read) == ""
    norm, *others = sorted(read, reverse=True)
    extra = {f"extra.{i}": torch.zeros(1) for i in range(5)}
    save_file({name: read[name] for name in others} | extra, tmp_path / "model.safetensors")
    said = f"will lack extra.0, extra.1, extra.2 and 2 more; will have, and it lacks, {norm}"
    assert differing_names(str(tmp_path), read) == said


def test_what_is_not_finite_is_never_saved_over_a_good_checkpoint():
    good = {"weights.a": torch.ones(3), "step": torch.tensor(4)}
    check_finite(good)
    for bad in (float("nan"), float("-inf")):
        with pytest.raises(
            OSError, match=r"^weights.b is not finite; the checkpoints before it are kept$"
        ):
            check_finite(good | {"weights.b": torch.tensor([0.0, bad])})
