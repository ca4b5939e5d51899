"""Replays of a small run that is recorded here: random trajectories, a tiny model, one rank, no engine."""

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from several_nodes import random_groups
from test_errors import is_line
from tiny_policy import load

from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config, OptimOptions
from asyncrl.job.checkpoints import Checkpoints
from asyncrl.job.node import Leader
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.trainer.batch import share_batch
from asyncrl.trainer.policy import NotFinite
from asyncrl.trainer.weight_files import save_weights
from asyncrl.weights.models import weights_sha256
from scripts import runs
from scripts.grids import NOT_FINITE
from scripts.replay import Recording, choose_options, train

CPU = torch.device("cpu")
NUM_STEPS = 3
REFUSALS = tomllib.loads(Path(__file__).with_name("errors.toml").read_text())["replay"]

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def config(model, tmp_path):
    """A run of three steps, two groups of three each."""
    return Config(
        model=model, steps=NUM_STEPS, groups_per_step=2, group_size=3, minibatches=2, eval_every=0, record=True,
        runs_dir=str(tmp_path), run_name="run", optim=OptimOptions(warmup_steps=0), lr=0.001,
    )  # fmt: skip


@pytest.fixture
def recording(config):
    """The run, recorded."""
    rank = make_leader(config, TimeLedger())
    for step in range(1, NUM_STEPS + 1):
        rank.on_batch(step, make_groups(step))
    rank.run.close()
    return Recording.open(rank.run.path)


def make_groups(step):
    """Random trajectories none of whose tokens is younger than the version that is trained at this step."""
    return random_groups(10 * step, num=2, group_size=3, max_tokens=24, newest=step - 1)


def make_leader(config, clock):
    """The only rank, with records and without workers."""
    rank = config, Cluster(), None, CPU, clock, None, None, None
    return Leader(*rank, config.model, RunDirectory(config), None, None, None)


def replay_to_end(recording, name, *options):
    """Replay in this process; return the metrics without the times, and the fingerprint of the last weights."""
    config = choose_options(recording, [f"--run-name={name}", *options])
    clock = TimeLedger()
    rank = make_leader(config, clock)
    train(recording, rank, load(config, clock), rank.run)
    rank.run.close()
    metrics = runs.load(rank.run.path).metrics.filter(regex="^(?!time/|trainer_time/)")
    return metrics, weights_sha256(rank.run.path / "checkpoints" / f"step_{config.steps}")


def train_by_hand(policy, steps):
    """Train on the batches of these steps as a run does."""
    stats = []
    for step in steps:
        share = share_batch(make_groups(step), step, policy, Cluster())
        stats.append(policy.train_step(share, step - 1))
    return stats


def test_a_replay_gives_the_bits_of_the_run_itself_and_another_loss_other_weights_on_the_same_data(
    recording, tmp_path
):
    metrics, weights = replay_to_end(recording, "first")
    policy = load(recording.config)
    stats = train_by_hand(policy, (1, 2, 3))
    save_weights(policy, str(tmp_path / "by_hand"))
    assert weights_sha256(tmp_path / "by_hand") == weights != recording.weights_sha256
    expected = runs.frame(stats)
    expected["samples"] = expected["samples"].cumsum()
    assert "loss/total" in expected and metrics[[*expected]].equals(expected)
    changes = ("--algo=tis", "--lr=0.01", "--advantage=gae", "--advantage.lam=0.9")
    other, other_weights = replay_to_end(recording, "other", *changes)
    of_data = "^(reward|staleness|response)/"
    assert metrics.filter(regex=of_data).equals(other.filter(regex=of_data))
    last = other.iloc[-1]
    assert other_weights != weights and metrics["drift/k3"].iloc[-1] != last["drift/k3"]
    assert last["tokens/generated"] == 0 and last["samples"] == NUM_STEPS * 6
    assert "value/explained_variance" in other


def test_a_step_that_is_not_finite_is_kept_and_fails_again_in_a_replay_in_the_same_way(config):
    config = replace(config, steps=9, record=False)
    rank = make_leader(config, TimeLedger())
    policy, groups = load(config, rank.clock), make_groups(4)
    train_by_hand(policy, (1, 2, 3))
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.behavior_logprobs[trajectory.loss_mask] = float("nan")
    share = share_batch(groups, 4, policy, Cluster())
    checkpoints = SimpleNamespace(rank=rank, policy=policy)
    failed = pytest.raises(RuntimeError, match=NOT_FINITE)  # ablate.py keeps this error only
    with failed as error, Checkpoints.keep_failed_batch(checkpoints, 4, groups):
        policy.train_step(share, 3)
    rank.run.close()
    kept = rank.run.path / "failed_step_4"
    assert str(error.value).endswith(f"train on its batch again: python scripts/replay.py {kept}")
    message = str(error.value.__cause__)
    with pytest.raises(NotFinite) as again:
        replay_to_end(Recording.open(kept), "again")
    assert message in (str(again.value), str(again.value).replace("update 0", "update 6"))
    # A batch that cannot be kept hides no reason.
    (rank.run.path / "failed_step_1").write_text("in the way")
    failed = pytest.raises(RuntimeError, match=r"loss nan .* could not be kept: .*failed_step_1")
    with failed, Checkpoints.keep_failed_batch(checkpoints, 1, groups):
        raise NotFinite("loss nan must be finite")


@pytest.mark.parametrize("option", REFUSALS)
def test_what_made_the_batches_cannot_be_changed(recording, option):
    recording = replace(recording, num_steps=2)
    assert choose_options(recording, []).steps == 2
    with pytest.raises(ValueError) as error:
        choose_options(recording, [option])
    assert is_line(str(error.value), REFUSALS[option]), error.value


def test_other_weights_are_refused(config, recording, untied):
    recording.check_weights("tiny", config.model)
    message = r"^--model tiny has weights .{12}…, and .*; give --model the folder with"
    with pytest.raises(ValueError, match=message):
        recording.check_weights("tiny", untied)
