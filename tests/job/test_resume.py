"""What a run may continue with, and from: options, whole checkpoints, and records that are truncated."""

import json
import os
import random
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from option_words import words_that_change
from programs import ROOT
from stored_forms import digest_of_form
from user_files import contents

from asyncrl.cluster.cluster import Cluster
from asyncrl.config import OPTIONS, ChangeableBy, Config, SwarmOptions
from asyncrl.controller.snapshot import ControllerState
from asyncrl.job.command_line import read_options
from asyncrl.job.resume import find_checkpoint, resume_hint
from asyncrl.runlog import manifest
from asyncrl.runlog.header import read_run_id
from asyncrl.runlog.manifest import (
    MANIFEST,
    RESUME_FOLDER,
    Checkpoint,
    NodeFacts,
    ResumePoint,
    clear_torn_checkpoints,
    find_newest_checkpoint,
    parse_step,
    write_manifest,
)
from asyncrl.runlog.run_directory import RunDirectory
from scripts.lines import read

pytestmark = pytest.mark.usefixtures("one_rank")


def make_run(folder, **options):
    directory = RunDirectory(Config(runs_dir=str(folder / "runs"), run_name="one", **options))
    directory.close()
    return directory.path


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The words that resume a run, and its options."""
    words = ["--resume", str(make_run(tmp_path_factory.mktemp("run")))]
    return words, read_options(words)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("resume", "optim.args")])
def test_an_option_changes_where_it_may_and_is_refused_by_name_with_both_values_elsewhere(
    begun, name
):
    option, (words, unchanged) = OPTIONS[name], begun
    arguments = [*words, *words_that_change(option)]
    if ChangeableBy.RESUME in option.changeable_by:
        config = read_options(arguments)
        assert option.value_in(config) != option.default
        assert config.as_dict() | {name: option.default} == unchanged.as_dict()
        return
    with pytest.raises(ValueError, match=f"{option.flag} .+ cannot change .+ has ") as caught:
        read_options(arguments)
    assert f"has {option.value_in(unchanged)};" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_continues_with_its_own_options_where_it_is_now_however_that_is_named(
    tmp_path, monkeypatch
):
    options = {"lr": 0.25, "algo_args": ("clip_high=0.3",), "swarm": SwarmOptions(refresh_lag=2)}
    make_run(tmp_path, **options, steps=7)
    moved = shutil.move(tmp_path / "runs" / "one", tmp_path / "two")
    (tmp_path / "link").symlink_to(moved)
    monkeypatch.chdir(moved)
    for name in (str(moved), str(tmp_path / "link"), "."):
        words = ["--resume", name, "--lr", "0.5", "--group-size", "8", "--swarm.lease-s", "5"]
        config = read_options(words)
        assert (config.lr, config.algo_args, config.steps) == (0.5, ("clip_high=0.3",), 7)
        assert config.swarm == SwarmOptions(refresh_lag=2, lease_s=5)
        assert Path(config.runs_dir, config.run_name) == tmp_path / "two"
        assert config.resume == name


def test_the_rows_of_a_run_are_found_from_any_folder(tmp_path, monkeypatch):
    rows = {
        "data_path": "rows.jsonl",
        "task": "jsonl",
        "task_args": ("test=held.jsonl", "system=test=a"),
    }
    monkeypatch.chdir(tmp_path)
    words = ["--resume", str(make_run(tmp_path, **rows))]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    config = read_options(words)
    assert config.data_path == str(tmp_path / "rows.jsonl")
    assert config.task_args == (f"test={tmp_path}/held.jsonl", "system=test=a")
    moved = read_options([*words, "--data-path", "../rows.jsonl"])
    assert moved.data_path == config.data_path


def test_a_model_in_a_folder_is_found_from_any_folder(tmp_path, monkeypatch):
    for name in ("model", "tiny", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    runs = {name: make_run(tmp_path / name, model=name) for name in ("model", "tiny")}
    monkeypatch.chdir(tmp_path / "other")
    models = {name: read_options(["--resume", str(run)]).model for name, run in runs.items()}
    assert models == {"model": str(tmp_path / "model"), "tiny": "tiny"}


def test_a_run_in_a_folder_whose_name_is_no_run_name_is_refused_by_its_folder(tmp_path):
    run = make_run(tmp_path).rename(tmp_path / "the best")
    with pytest.raises(
        ValueError, match=f"{run}: the name of a run's folder must be made of .+; rename"
    ):
        read_options(["--resume", str(run)])


# Checkpoints


def make_checkpoint(run, step, run_id=None):
    path = run / "checkpoints" / f"step_{step}"
    (path / RESUME_FOLDER).mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights" * step)
    (path / RESUME_FOLDER / "shard.safetensors").write_bytes(b"state" * 1000)
    (path / RESUME_FOLDER / "node_0.msgpack").write_bytes(b"groups")
    nodes = [{"probe": {}, "record_bytes": {}, "problems_digest": ""}]
    facts = {"frozen_sha256": "", "nodes": nodes, "held_back": []}
    write_manifest(path, run_id=run_id or read_run_id(run), step=step, **facts)
    return path


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = (cut, flip, Path.unlink)
FILES = ("model.safetensors", "shard.safetensors", "node_0.msgpack", MANIFEST)
LEFTOVERS = ("step_14.tmp", "step_3.old-77", "step_2.tmp")


def damage(run, step, kind, monkeypatch):
    """Make a checkpoint that no run may continue from; returns what is said of it."""
    if kind == "of another run":
        make_checkpoint(run, step, run_id="b" * 16)
        return f"it is of run {'b' * 16}, and {run} is run {read_run_id(run)}"
    if kind == "of another format":
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "FORMAT", 99)
            make_checkpoint(run, step)
        return f"its format is 99, and this code reads {manifest.FORMAT}"
    damage_file, name = kind
    (file,) = make_checkpoint(run, step).rglob(name)
    damage_file(file)
    return name


@pytest.mark.parametrize("seed", range(12))
def test_the_newest_whole_checkpoint_is_found_what_is_newer_is_named_and_leftovers_go(
    tmp_path, seed, capsys, monkeypatch
):
    rng, run = random.Random(seed), make_run(tmp_path)
    make_checkpoint(run, 3)
    whole = make_checkpoint(run, 9)
    folder = whole.parent
    # weights alone, what was set aside, and what is the user's
    for name in (
        "step_7",
        f"step_6.torn-12/{RESUME_FOLDER}",
        f"step_x/{RESUME_FOLDER}",
        "notes.tmp",
    ):
        (folder / name).mkdir(parents=True)
    kinds = [(DAMAGES[seed % 3], FILES[seed // 3]), "of another run", "of another format"]
    steps = sorted(rng.sample(range(10, 30), 3))
    reasons = {}
    for step, kind in zip(steps, rng.sample(kinds, 3), strict=True):
        reasons[step] = damage(run, step, kind, monkeypatch)
    for name in LEFTOVERS:
        leftover = folder / name
        rng.choice((Path.mkdir, Path.touch, lambda path: path.symlink_to(tmp_path)))(leftover)
    found = find_checkpoint(Config(resume=str(run), steps=99), Cluster())
    assert (found.path, found.step) == (whole, 9)
    lines = capsys.readouterr().out.splitlines()
    for step, line in zip(sorted(steps, reverse=True), lines, strict=True):
        assert line.startswith(f"warning: skipped checkpoint {folder}/step_{step}: ")
        assert reasons[step] in line
    clear_torn_checkpoints(found)
    left = {path.name.partition(".torn-")[0] for path in folder.iterdir()}
    assert left == {"step_3", "step_6", "step_7", "step_9", "step_x", "notes.tmp"} | {
        f"step_{step}" for step in steps
    }
    assert max(map(parse_step, folder.iterdir())) == 9, "later steps may be saved again"
    assert tmp_path.exists() and find_newest_checkpoint(run).skipped == []
    flip(whole / "model.safetensors")
    (folder / "step_3/model.safetensors").unlink()
    line = r"step_9: model.safetensors was changed; .+step_3: model.safetensors is missing; begin"
    with pytest.raises(ValueError, match=f"it has no whole checkpoint; .+{line} a new run$"):
        find_checkpoint(Config(resume=str(run)), Cluster())


# Records


@pytest.fixture
def ended(tmp_path):
    """Options and folder of a run that has ended, and what the first event would say of its checkpoint at step 1."""
    config = Config(runs_dir=str(tmp_path), run_name="one", steps=4)
    run = RunDirectory(config, 2)
    for step in (1, 2):
        run.log_metrics({"step": step})
        run.record_event("step", step=step)
        run.log_sample(step=step)
        if step == 1:
            resumed = ResumePoint(1, run.record_bytes(), [])
    run.close(RuntimeError("killed"))
    return config, run.path, resumed


@pytest.mark.parametrize("name", ["metrics", "events", "samples"])
def test_records_that_somebody_has_changed_are_refused_or_named(ended, capsys, name):
    config, path, resumed = ended
    size, file = resumed.record_bytes[name], path / f"{name}.jsonl"
    before = contents(path)
    within_a_line = replace(resumed, record_bytes=resumed.record_bytes | {name: size - 2})
    line = rf"{name}\.jsonl .+ is not the end of a line.+ Nothing was changed"
    with pytest.raises(ValueError, match=line) as caught:
        RunDirectory(config, resume_point=within_a_line)
    assert contents(path) == before and "\n" not in str(caught.value)
    del caught  # which has the file open, and locked
    os.truncate(file, size - 3)
    whole = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    run = RunDirectory(config, resume_point=resumed)
    run.continue_records()
    run.close()
    counted = f"{size - 3} of the {size} bytes that the checkpoint counts"
    text = f"warning: {file} has {counted}; the missing lines are lost\n"
    assert capsys.readouterr().out == text
    assert read(path / f"{name}.jsonl")[: len(whole)] == whole, "and no part of a line"


def test_a_node_that_is_new_gets_a_folder_and_that_of_another_runs_node_is_refused(tmp_path):
    config, first, second = Config(runs_dir=str(tmp_path), run_name="one"), "a" * 16, "b" * 16
    options = {
        "node_folder": "one/node_1",
        "resume_point": ResumePoint(1, {}, []),
    }
    run = RunDirectory(config, run_id=first, **options)
    run.continue_records()
    run.close()
    line = f"node_1 is of run {first}, and the checkpoint of run {second}"
    with pytest.raises(ValueError, match=line):
        RunDirectory(config, run_id=second, **options)


def test_events_of_a_node_stay_while_it_is_absent(tmp_path):
    """Two nodes, one node, two nodes. Each start makes a step that is saved, and one that is lost."""
    config = Config(runs_dir=str(tmp_path), run_name="one")
    checkpoint, steps = None, []
    for first_step, num_nodes in ((1, 2), (3, 1), (5, 2)):
        runs = []
        for node in range(num_nodes):
            run = RunDirectory(
                config,
                node_folder=f"one/node_{node}" if node else "",
                run_id=runs[0].run_id if runs else None,
                resume_point=checkpoint and checkpoint.resume_point(node, num_nodes),
            )
            runs.append(run)
        for run in runs:
            if checkpoint is not None:
                run.continue_records()
            run.record_event("step", step=first_step)
        nodes = [NodeFacts({}, run.record_bytes(), "") for run in runs]
        checkpoint = Checkpoint(tmp_path, [], runs[0].run_id, first_step, "", nodes, [])
        for run in runs:
            run.record_event("step", step=first_step + 1)
            run.close()
        folders = (runs[0].path, runs[0].path / "node_1")
        steps.append([[event["step"] for event in read_steps(folder)] for folder in folders])
    assert steps == [[[1, 2], [1, 2]], [[1, 3, 4], [1]], [[1, 3, 5, 6], [1, 5, 6]]]


def read_steps(folder):
    return [event for event in read(folder / "events.jsonl") if event["event"] == "step"]


def test_a_run_that_was_stopped_says_what_to_type_from_any_folder(tmp_path, monkeypatch):
    run = tmp_path / "my run"
    line = "nothing is saved yet; --save-every N saves on the way"
    assert resume_hint(None) == resume_hint(run) == line
    only_weights = "step_20"
    for name in (f"step_4/{RESUME_FOLDER}", f"step_12/{RESUME_FOLDER}", only_weights):
        (run / "checkpoints" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    of_four = ["--nproc-per-node", "4", "--shutdown-timeout", "600"]
    for num_ranks, ranks in (("1", []), ("4", of_four)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
        step, _, words = resume_hint(run).partition(": ")
        launcher, *options, program, resume, path = shlex.split(words)
        assert (step, options) == ("continue from step 12", ranks)
        assert (resume, path) == ("--resume", str(run))
        assert Path(launcher).name == "torchrun"
        assert Path(program).samefile(ROOT / "train_async.py")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    of_nodes = "continue from step 12: the torchrun command of each node, with --resume "
    assert resume_hint(run) == f"{of_nodes}{shlex.quote(str(run))}"
    monkeypatch.delenv("GROUP_WORLD_SIZE")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    launcher, *options = shlex.split(resume_hint(run).partition(": ")[2])
    assert Path(launcher).name == "python" and options == [program, "--resume", str(run)]


def test_a_run_that_was_stopped_on_nodes_that_share_no_folder_says_where_its_weights_are(tmp_path):
    run = tmp_path / "my run"
    (run / "checkpoints" / "step_4.tmp").mkdir(parents=True)
    assert resume_hint(run) == "nothing is saved yet; --save-every N saves on the way"
    for step in (4, 12):
        (run / "checkpoints" / f"step_{step}").mkdir()
    line = resume_hint(run)
    assert line.startswith(
        "only its weights are saved, by --save weights or because nodes share no --runs-dir; "
    )
    words = shlex.split(line.rpartition("; ")[2])
    assert words == ["begin", "a", "new", "run", "with", "--model", f"{run}/checkpoints/step_12"]


def test_another_form_of_checkpoints_has_another_number():
    """A changed digest needs a new FORMAT, a line in CHANGELOG.md and then the digest here."""
    kinds = ControllerState, manifest.NodeFacts, manifest.Checkpoint
    assert (manifest.FORMAT, digest_of_form(kinds)) == (10, "b277fe2611e8d4d1")
