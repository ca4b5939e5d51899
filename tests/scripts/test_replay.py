"""Replays of a small run that is recorded here: random trajectories, a tiny model, one rank, no engine."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_worker import run_fake_worker
from tiny_policy import load, random_sequences, save_tiny_model

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config, OptimOptions
from asyncrl.controller.controller import Controller
from asyncrl.controller.tickets import PromptSource, TicketSource
from asyncrl.controller.workers import Workers
from asyncrl.job.checkpoints import Checkpoints
from asyncrl.job.node import Leader
from asyncrl.job.probe import Probe
from asyncrl.records import Group, Trajectory
from asyncrl.runlog.batches import batch_path, weights_sha256, write_batch
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.trainer import batch
from asyncrl.trainer.checkpoint import save_weights
from asyncrl.trainer.policy import NotFinite
from data.problem import Problem
from scripts import runs
from scripts.replay import Recording, choose_options, evaluate_last, train
from scripts.report import make_page
from scripts.timeline import trace

ROOT = Path(__file__).parents[2]

CPU = torch.device("cpu")
NUM_STEPS = 3


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """Directory of a recorded run of three steps, two groups of three each, trained with grpo in two minibatches."""
    config = Config(
        model=model, steps=NUM_STEPS, groups_per_step=2, group_size=3, minibatches=2, eval_every=0, record=True,
        runs_dir=str(tmp_path_factory.mktemp("runs")), run_name="run", optim=OptimOptions(warmup=0),
    )  # fmt: skip
    directory = RunDirectory(config, weights_sha256=weights_sha256(model))
    for step in range(1, NUM_STEPS + 1):
        write_batch(batch_path(directory.path, step), step, make_groups(step))
    directory.close()
    return directory.path


def make_groups(step):
    """Random trajectories none of whose tokens is younger than the version that is trained at this step."""
    ids = (10 * step, 10 * step + 1)
    return [
        Group(group_id, tuple(make_trajectory(step, group_id, member) for member in range(3)))
        for group_id in ids
    ]


def make_trajectory(step, group_id, member):
    (sequence,) = random_sequences(1, seed=100 * group_id + member)
    versions = sequence.policy_versions.clip(max=step - 1)
    return Trajectory(
        ticket_id=0, group_id=group_id, member=member, tokens=sequence.tokens, loss_mask=sequence.loss_mask,
        behavior_logprobs=sequence.behavior_logprobs, policy_versions=versions, reward=sequence.reward,
        finish_reason="stop", failure="", num_turns=1, started_at=0.0, ended_at=1.0, worker=0,
    )  # fmt: skip


def make_node(config, clock, placement=None, *, run, controller=None):
    """The only rank's node, of a model that is there."""
    rank = config, Cluster(), placement, CPU, clock, None, None, None
    return Leader(*rank, config.model, Probe(config), run, None, controller, None)


def replay_to_end(recording, tmp_path, *options):
    """Replay in this process; return the metrics without the times, and the fingerprint of the last weights."""
    config = choose_options(recording, [f"--runs-dir={tmp_path}", *options], evaluate=False)
    clock = TrainerClock()
    node = make_node(config, clock, run=RunDirectory(config))
    train(recording, node, load(config, clock), node.run, evaluate=False)
    node.run.close()
    metrics = runs.load(node.run.path).metrics.filter(regex="^(?!time/|trainer_time/)")
    return metrics, weights_sha256(node.run.checkpoint_path(config.steps))


def test_two_replays_give_the_same_bits_and_those_of_the_run_itself(run, tmp_path):
    recording = Recording.open(run)
    metrics, weights = replay_to_end(recording, tmp_path, "--run-name=first")
    again, weights_again = replay_to_end(recording, tmp_path, "--run-name=second")
    assert again.equals(metrics) and weights_again == weights != recording.weights_sha256
    policy = load(recording.config)
    stats = []
    for version in range(NUM_STEPS):
        updates = batch.deal(make_groups(version + 1), version + 1, policy, Cluster())
        stats.append(policy.train_step(updates, version))
    save_weights(policy, str(tmp_path / "run"))
    assert weights_sha256(tmp_path / "run") == weights
    assert metrics["loss/total"].tolist() == [of_step["loss"] for of_step in stats]
    assert metrics["drift/k3"].tolist() == [of_step["drift/k3"] for of_step in stats]


def test_another_loss_or_learning_rate_meets_the_same_data_with_other_weights(run, tmp_path):
    recording = Recording.open(run)
    metrics, weights = replay_to_end(recording, tmp_path, "--run-name=same")
    changes = ("--run-name=other", "--algo=tis", "--lr=0.01")
    other, other_weights = replay_to_end(recording, tmp_path, *changes)
    of_data = "^(reward|staleness|response)/"
    assert metrics.filter(regex=of_data).equals(other.filter(regex=of_data))
    last = other.iloc[-1]
    assert other_weights != weights and metrics["drift/k3"].iloc[-1] != last["drift/k3"]
    assert last["tokens/generated"] == 0 and last["samples"] == NUM_STEPS * 6


def test_a_step_that_is_not_finite_is_kept_and_fails_again_in_a_replay_in_the_same_way(
    model, tmp_path
):
    config = Config(
        model=model, steps=9, groups_per_step=2, group_size=3, eval_every=0, runs_dir=str(tmp_path), run_name="run",
        optim=OptimOptions(warmup=0),
    )  # fmt: skip
    clock = TrainerClock()
    node = make_node(config, clock, run=RunDirectory(config))
    policy, groups = load(config, clock), make_groups(4)
    for step in (1, 2, 3):
        policy.train_step(batch.deal(make_groups(step), step, policy, Cluster()), step - 1)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.behavior_logprobs[trajectory.loss_mask] = float("nan")
    updates = batch.deal(groups, 4, policy, Cluster())
    with (
        pytest.raises(RuntimeError, match="must be finite") as failed,
        keep_what_fails(node, policy, 4, groups),
    ):
        policy.train_step(updates, 3)
    node.run.close()
    kept = tmp_path / "run" / "failed_step_4"
    assert str(failed.value).endswith(f"train on its batch again: python scripts/replay.py {kept}")
    own_message = str(failed.value.__cause__)
    with pytest.raises(NotFinite) as again:
        replay_to_end(Recording.open(kept), tmp_path, "--run-name=again")
    assert str(again.value).replace("update 0", "update 3") == own_message


def keep_what_fails(node, policy, step, groups):
    return Checkpoints.keep_what_fails(SimpleNamespace(node=node, policy=policy), step, groups)


def test_a_batch_that_cannot_be_kept_hides_no_reason(model, tmp_path):
    config = Config(model=model, steps=9, runs_dir=str(tmp_path), run_name="run")
    node = make_node(config, TrainerClock(), run=RunDirectory(config))
    (node.run.path / "failed_step_1").write_text("in the way")
    failed = pytest.raises(RuntimeError, match=r"loss nan .* could not be kept: .*failed_step_1")
    with failed, keep_what_fails(node, load(config), 1, make_groups(1)):
        raise NotFinite("loss nan must be finite")


def test_a_replay_is_drawn_and_reported_like_a_run(run, tmp_path):
    replay_to_end(
        Recording.open(run), tmp_path, "--run-name=replay", "--advantage=gae", "--advantage.lam=0.9"
    )
    replayed = runs.load(tmp_path / "replay")
    assert runs.summarise(replayed.metrics)["steps"] == NUM_STEPS
    assert "value/explained_variance" in replayed.metrics
    tables = make_page(replayed, trace(replayed), 0.0)["tables"]
    assert [*tables] == ["Where the trainer's time went, rank 0"]


def test_a_replay_goes_as_far_as_the_recorded_batches(run):
    recording = Recording.open(run)
    short = replace(recording, num_steps=2)
    assert choose_options(short, [], evaluate=False).steps == 2
    with pytest.raises(ValueError, match=r"^--steps 3: .* has batches of 2 steps$"):
        choose_options(short, ["--steps=3"], evaluate=False)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--temperature=0.5",
            r"^--temperature cannot be changed: the batches were made with temperature = 1.0\.",
        ),
        ("--group-size=2", "^--group-size cannot be changed: .*--algo, --algo-args"),
        ("--on-update=wait", "^--on-update cannot be changed"),
        ("--seed=1", "^--seed cannot be changed"),
        ("--record", "^--record cannot be changed"),
        ("--eval-problems=8", "^--eval-problems means nothing without --evaluate"),
        ("--minibatches=4", "--groups-per-step 2 is not a multiple of --minibatches 4"),
    ],
)
def test_what_made_the_batches_cannot_be_changed(run, option, message):
    with pytest.raises(ValueError, match=message) as error:
        choose_options(Recording.open(run), [option], evaluate=False)
    assert "\n" not in str(error.value)


def test_other_weights_than_the_runs_are_refused(run, tmp_path):
    other = save_tiny_model(str(tmp_path), tied=False)
    recording = Recording.open(run)
    recording.check_weights("tiny", recording.config.model)
    with pytest.raises(
        ValueError, match=r"^--model tiny has weights .{12}…, and .*; give --model the folder with"
    ):
        recording.check_weights("tiny", other)


def change_header(run, **changes):
    header = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(header | changes))


def test_a_directory_that_cannot_be_replayed_is_one_line(model, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(ValueError, match="no run is there"):
        Recording.open(path)
    config = Config(model=model, runs_dir=str(tmp_path), run_name="run")
    RunDirectory(config).close()
    with pytest.raises(
        ValueError, match=r"was not recorded; only a run of train_async\.py --record"
    ):
        Recording.open(path)
    change_header(path, weights_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"step_000001\.msgpack is missing"):
        Recording.open(path)
    for step in (1, 3):
        write_batch(batch_path(path, step), step, make_groups(step))
    with pytest.raises(ValueError, match=r"step_000002\.msgpack is missing"):
        Recording.open(path)
    change_header(path, config=config.as_dict() | {"reward_timeout_s": 10.0})
    with pytest.raises(
        ValueError, match="made by other code, which had reward_timeout_s; use that code, commit "
    ):
        Recording.open(path)


def test_the_last_weights_are_evaluated_on_the_held_out_problems(run, model, tmp_path):
    recording = Recording.open(run)
    config = choose_options(
        recording, [f"--runs-dir={tmp_path}", "--eval-problems=4"], evaluate=True
    )
    placement = Placement((None,), 1, (WorkerPlacement(0, None, None, 1, 0.0),), "shm")
    prompts = PromptSource(
        train_problem=lambda index: Problem("p", "ok"),
        eval_problems=[Problem("e", answer) for answer in ("vary", "vary", "vary", "fail")],
        encode=lambda problem: [2, 3],
    )
    directory = RunDirectory(config)
    workers = Workers(config, placement, model, directory.path, run_fake_worker)
    controller = Controller(config, workers, TicketSource(config, prompts), directory.record)
    try:
        controller.launch()
        node = make_node(config, controller.clock, placement, run=directory, controller=controller)
        evaluated = evaluate_last(node, load(config))
    finally:
        controller.stop()
        directory.close()
    assert evaluated == {
        "eval/accuracy": 1 / 4,
        "eval/policy_version": NUM_STEPS,
        "eval/problems": 3,
        "eval/failed": 1,
    }


def test_a_refusal_ends_the_script_with_one_line_and_status_2(tmp_path):
    command = [sys.executable, "scripts/replay.py", str(tmp_path), "--lr", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(
        f"error: replay {tmp_path}: no run is there"
    )
    assert done.stderr.count("\n") == 1
