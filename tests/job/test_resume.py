"""What a run may go on with, and from: options, whole checkpoints, and records that are cut back."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from option_words import words_that_change

from asyncrl.cluster.cluster import Cluster
from asyncrl.config import (
    OPTIONS,
    Config,
    May,
    SwarmOptions,
    options_for,
)
from asyncrl.job.command_line import read_options
from asyncrl.job.resume import find_checkpoint, how_to_go_on
from asyncrl.runlog.manifest import (
    MANIFEST,
    PART,
    checkpoints_in,
    digest_of,
    newest_checkpoint,
    set_aside,
    write_manifest,
)
from asyncrl.runlog.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("one_rank")
ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.executable).with_name("python")


def make_run(tmp_path, **options):
    directory = RunDirectory(Config(runs_dir=str(tmp_path / "runs"), run_name="one", **options))
    directory.close()
    return directory.path


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("resume", "optim.args")])
def test_an_option_changes_where_it_may_and_is_refused_by_name_with_both_values_elsewhere(
    tmp_path, name
):
    run = make_run(tmp_path)
    option = OPTIONS[name]
    arguments = ["--resume", str(run), *words_that_change(option)]
    unchanged = read_options(["--resume", str(run)])
    if May.RESUME in option.may:
        config = read_options(arguments)
        assert option.value_in(config) != option.default
        assert config.as_dict() | {name: option.default} == unchanged.as_dict()
        return
    with pytest.raises(ValueError, match=f"{option.flag} .+ cannot change .+ has ") as caught:
        read_options(arguments)
    assert f"has {option.value_in(unchanged)};" in str(caught.value) and "\n" not in str(
        caught.value
    )


def test_what_a_resume_may_change_is_how_long_what_is_kept_and_where_it_is_computed():
    assert {option.name for option in options_for(May.RESUME)} == {
        "steps", "lr", "save_every", "keep_last", "stop_after_s", "eval_every", "eval_greedy", "wandb",
        "num_rollout_workers", "rollout_tp", "max_running_requests", "weight_sync", "colocate",
        "gpu_memory_utilization", "replicas", "save_memory", "max_tokens_per_microbatch", "compile", "listen",
        "join_timeout_s", "timeout_s", "env_timeout_s", "data_path", "optim.epochs", "optim.warmup", "optim.schedule",
        "optim.least", "optim.by_ess", "optim.entropy", "optim.args", "swarm.lease_s", "swarm.verify_share",
        "swarm.snapshots",
    }  # fmt: skip


def test_a_run_goes_on_with_its_own_options_where_it_is_now(tmp_path):
    make_run(tmp_path, lr=0.25, algo_args=("clip_high=0.3",), steps=7)
    moved = shutil.move(tmp_path / "runs" / "one", tmp_path / "two")
    config = read_options(["--resume", str(moved), "--lr", "0.5", "--group-size", "8"])
    assert (config.lr, config.algo_args, config.steps) == (0.5, ("clip_high=0.3",), 7)
    assert Path(config.runs_dir, config.run_name) == tmp_path / "two" and config.resume == str(
        moved
    )


def test_a_run_goes_on_in_its_own_directory_however_that_is_named(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    for name in (str(tmp_path / "link"), "."):
        config = read_options(["--resume", name])
        assert Path(config.runs_dir, config.run_name) == Path(run)


def test_a_machine_may_not_become_less_late_than_what_is_sampled_already(tmp_path):
    run = make_run(tmp_path, swarm=SwarmOptions(refresh_lag=2))
    config = read_options(["--resume", str(run), "--swarm.lease-s", "5"])
    assert config.swarm == SwarmOptions(refresh_lag=2, lease_s=5)
    with pytest.raises(ValueError, match=r"--swarm.refresh-lag 0 cannot change .+ has 2"):
        read_options(["--resume", str(run), "--swarm.refresh-lag", "0"])


def test_where_no_run_is_or_one_of_other_code_one_line_says_so(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"--resume .+nothing: no run is there .+ give a run's directory, runs/NAME$",
    ):
        read_options(["--resume", str(tmp_path / "nothing")])
    run = make_run(tmp_path)
    made = json.loads((run / "run.json").read_text())
    made["config"]["an_old_option"] = 1
    (run / "run.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match="made by other code, which had an_old_option"):
        read_options(["--resume", str(run)])


# Checkpoints


def make_checkpoint(run, step, **facts):
    path = run / "checkpoints" / f"step_{step}"
    (path / PART).mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights" * step)
    (path / PART / "shard.safetensors").write_bytes(b"state" * 1000)
    (path / PART / "node_0.msgpack").write_bytes(b"groups")
    files = {str(f.relative_to(path)): digest_of(f) for f in path.rglob("*") if f.is_file()}
    empty = {"frozen_sha256": "", "nodes": [{"probe": {}, "records": {}}], "delayed": []}
    write_manifest(path, files, **{"run_id": id_of(run), "step": step} | empty | facts)
    return path


def id_of(run):
    return json.loads((run / "run.json").read_text()).get("run_id")


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "shard.safetensors", "node_0.msgpack", MANIFEST]
)
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_torn_checkpoint_is_named_and_the_one_before_it_is_gone_on_from(
    tmp_path, name, damage, capsys
):
    run = make_run(tmp_path)
    older, newer = make_checkpoint(run, 9), make_checkpoint(run, 10)
    assert newest_checkpoint(run).path == newer
    (file,) = newer.rglob(name)
    damage(file)
    found = find_checkpoint(Config(resume=str(run), steps=11), Cluster())
    assert (found.path, found.step) == (older, 9)
    said = capsys.readouterr().out
    assert (
        said.startswith(f"warning: skipped checkpoint {newer}: ")
        and name in said
        and said.count("\n") == 1
    )
    (newer.parent / "step_12.tmp").mkdir()
    (newer.parent / "step_3.old-77").mkdir()
    set_aside(found)
    assert [path.name.partition(".torn-")[0] for path in sorted(newer.parent.iterdir())] == [
        "step_10",
        "step_9",
    ]
    assert checkpoints_in(newer.parent) == [older], "its step may be saved again"


def test_what_is_half_written_goes_also_where_it_is_a_file_or_a_link(tmp_path):
    run = make_run(tmp_path)
    folder, kept = make_checkpoint(run, 9).parent, tmp_path / "kept"
    kept.mkdir()
    (folder / "step_14.tmp").write_text("")
    (folder / "step_3.old-77").write_text("")
    (folder / "step_15.tmp").symlink_to(kept)
    (folder / "notes.tmp").write_text("the user's")
    set_aside(newest_checkpoint(run))
    assert (
        sorted(path.name for path in folder.iterdir()) == ["notes.tmp", "step_9"] and kept.is_dir()
    )


def test_a_checkpoint_of_another_run_is_named_and_passed_over(tmp_path):
    run, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    own = make_checkpoint(run, 9)
    newer = own.with_name("step_14")
    shutil.copytree(make_checkpoint(other, 14), newer)
    found = newest_checkpoint(run)
    assert found.path == own and id_of(run) != id_of(other)
    assert found.skipped == [f"{newer}: it is of run {id_of(other)}, and {run} is run {id_of(run)}"]


def test_where_no_checkpoint_is_whole_one_line_says_what_is_wrong_with_each(tmp_path):
    run = make_run(tmp_path)
    with pytest.raises(ValueError, match="no whole checkpoint is there; begin a new run"):
        find_checkpoint(Config(resume=str(run)), Cluster())
    (make_checkpoint(run, 3) / "model.safetensors").unlink()
    cut(make_checkpoint(run, 6) / "model.safetensors")
    what = r"step_6: model.safetensors is not as it was written; .+step_3: model.safetensors is missing; begin"
    with pytest.raises(ValueError, match=what) as caught:
        find_checkpoint(Config(resume=str(run)), Cluster())
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_format_is_not_read(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    monkeypatch.setattr("asyncrl.runlog.manifest.FORMAT", 99)
    make_checkpoint(run, 3)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="its format is 99, and this code reads 4"):
        newest_checkpoint(run)


@pytest.mark.parametrize("steps", [10, 4])
def test_resume_past_the_target_ends_well_and_changes_nothing(tmp_path, capsys, steps):
    run = make_run(tmp_path)
    make_checkpoint(run, 10)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as ended:
        find_checkpoint(Config(resume=str(run), steps=steps), Cluster())
    assert ended.value.code == 0
    assert capsys.readouterr().out == (
        f"finished already: {run} has made 10 steps of {steps}; to continue, raise --steps\n"
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_is_half_written_or_set_aside_is_no_checkpoint(tmp_path):
    run = make_run(tmp_path)
    make_checkpoint(run, 3)
    for name in ("step_6.tmp", "step_6.torn-12", "step_1.old-12", "step_x"):
        shutil.copytree(run / "checkpoints" / "step_3", run / "checkpoints" / name)
    (run / "checkpoints" / "step_8").mkdir()
    assert [path.name for path in checkpoints_in(run / "checkpoints")] == ["step_3"]


# Records


def lines(run, name):
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def test_records_go_on_in_the_same_files_from_where_they_were_at_the_checkpoint(tmp_path):
    config = Config(runs_dir=str(tmp_path), run_name="one", steps=4)
    run = RunDirectory(config, 2)
    for step in (1, 2):
        run.log_metrics({"step": step})
        run.record("step", step=step)
        run.log_sample(step=step)
        if step == 1:
            sizes = run.sizes()
    run.close(RuntimeError("killed"))
    changed = dataclasses.replace(config, resume=str(run.path), steps=9)
    go_on = {"step": 1, "records": sizes, "skipped": []}
    for _ in range(2):
        run = RunDirectory(changed, 1, resumed=go_on)
        run.record("early")
        run.cut_back()
        assert run.last_metrics() == {"step": 1}
        run.log_metrics({"step": 2, "again": True})
        run.close()
    assert lines(run.path, "metrics") == [{"step": 1}, {"step": 2, "again": True}]
    assert lines(run.path, "samples") == [{"step": 1}]
    assert [e["event"] for e in lines(run.path, "events")] == [
        *("run_started", "step", "run_resumed", "early", "run_ended")
    ]
    made = json.loads((run.path / "run.json").read_text())
    assert (made["world_size"], made["config"]["steps"], made["config"]["resume"]) == (2, 9, None)
    assert [(start["step"], start["world_size"]) for start in made["resumed"]] == [(1, 1), (1, 1)]


@pytest.fixture
def ended(tmp_path):
    """The options of a run that has ended, and what the first event would say of its checkpoint at step 1 of 2."""
    config = Config(runs_dir=str(tmp_path), run_name="one")
    run = RunDirectory(config)
    for step in (1, 2):
        run.log_metrics({"step": step})
        run.log_sample(step=step)
        if step == 1:
            resumed = {"step": 1, "records": run.sizes(), "skipped": []}
    run.close(RuntimeError("killed"))
    return config, resumed


def contents(config):
    folder = Path(config.runs_dir, config.run_name)
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_whose_checkpoint_is_refused_after_all_leaves_every_record_as_it_was(ended):
    config, resumed = ended
    before = contents(config)
    run = RunDirectory(config, resumed=resumed)
    run.record("worker_ready", worker=0)
    run.close(ValueError("it is of another model"))
    assert contents(config) == before
    run = RunDirectory(config, resumed=resumed)
    run.cut_back()
    run.close()
    assert contents(config) != before


@pytest.mark.parametrize("name", ["metrics", "events", "samples"])
def test_records_are_cut_at_the_end_of_a_line_only(ended, name):
    config, resumed = ended
    before = contents(config)
    resumed["records"][name] -= 2
    with pytest.raises(
        ValueError, match=rf"{name}\.jsonl .+ is not the end of a line.+ Nothing was changed"
    ) as caught:
        RunDirectory(config, resumed=resumed)
    assert contents(config) == before and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["metrics", "events", "samples"])
def test_records_that_are_shorter_than_the_checkpoint_says_are_named(ended, capsys, name):
    config, resumed = ended
    file = Path(config.runs_dir, config.run_name, f"{name}.jsonl")
    file.unlink()
    run = RunDirectory(config, resumed=resumed)
    run.cut_back()
    run.close()
    size = resumed["records"][name]
    said = f"warning: {file} has 0 of the {size} bytes that the checkpoint counts; the lines that lack are lost\n"
    assert capsys.readouterr().out == said


def test_the_folder_of_another_run_s_node_is_refused(tmp_path):
    config, resumed = (
        Config(runs_dir=str(tmp_path), run_name="one"),
        {"step": 1, "records": {}, "skipped": []},
    )
    RunDirectory(config, node_folder="one/node_1", run_id="a" * 16).close()
    with pytest.raises(
        ValueError, match=rf"node_1 is of run {'a' * 16}, and the checkpoint of run {'b' * 16}"
    ):
        RunDirectory(config, node_folder="one/node_1", run_id="b" * 16, resumed=resumed)


def test_records_that_somebody_has_cut_shorter_go_on_after_their_last_whole_line(tmp_path):
    config = Config(runs_dir=str(tmp_path), run_name="one")
    run = RunDirectory(config)
    run.record("one")
    run.record("two")
    sizes = run.sizes()
    run.close()
    os.truncate(run.path / "events.jsonl", sizes["events"] - 3)
    run = RunDirectory(config, resumed={"step": 1, "records": sizes, "skipped": []})
    run.cut_back()
    run.close()
    assert [e["event"] for e in lines(run.path, "events")] == [
        "run_started",
        "one",
        "run_resumed",
        "run_ended",
    ]


def test_a_node_that_was_not_there_before_gets_a_folder(tmp_path):
    config = Config(runs_dir=str(tmp_path), run_name="one")
    run = RunDirectory(
        config, node_folder="one/node_1", resumed={"step": 1, "records": {}, "skipped": []}
    )
    run.cut_back()
    run.close()
    assert [e["event"] for e in lines(run.path, "events")] == ["run_resumed", "run_ended"]


def test_weights_and_biases_go_on_in_the_same_run(tmp_path):
    config = Config(runs_dir=str(tmp_path), run_name="one", wandb="offline")
    run = RunDirectory(config)
    run.log_metrics({"step": 1})
    go_on = {"step": 1, "records": run.sizes(), "skipped": []}
    run.close()
    run = RunDirectory(config, resumed=go_on)
    run.cut_back()
    run.log_metrics({"step": 2})
    run.close()
    ids = {
        re.match(r"offline-run-\w+-(\w+)", path.name)[1]
        for path in (run.path / "wandb").glob("offline-run-*")
    }
    assert ids == {json.loads((run.path / "run.json").read_text())["wandb_id"]}


# How to go on


def test_a_run_that_was_stopped_says_what_to_type_or_why_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    run = tmp_path / "my run"
    assert how_to_go_on(None) == how_to_go_on(run) == "nothing is saved, as no step had ended"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert how_to_go_on(run).startswith(
        "nothing is saved, as the running step was not waited for; --save-every N"
    )
    for step in (4, 12):
        (run / "checkpoints" / f"step_{step}" / PART).mkdir(parents=True)
    (run / "checkpoints" / "step_20").mkdir()  # weights alone
    assert how_to_go_on(run) == f"continue from step 12: {PYTHON} train_async.py --resume '{run}'"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert f": {PYTHON.with_name('torchrun')} train_async.py --resume" in how_to_go_on(run)


STOPPED = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from asyncrl.config import OPTIONS, AdvantageOptions, Config, May, OptimOptions, SwarmOptions, options_for
from asyncrl.job import node as module
from train_async import run_job

def job():
    node = SimpleNamespace(config=Config(), model_path="model", run=SimpleNamespace(path=Path(sys.argv[1])))
    module.start_leader = lambda rank, worker_main: node
    with module.start_rank(Config()) as rank, module.start_node(rank, None):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

run_job(job)
"""


def test_the_last_line_of_a_run_that_is_stopped_says_how_to_go_on(tmp_path):
    (tmp_path / "checkpoints/step_4" / PART).mkdir(parents=True)
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"
    }
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    said = f"error: stopped by SIGINT; continue from step 4: {PYTHON} train_async.py --resume {tmp_path}"
    assert ended.stderr.splitlines()[-1] == said and ended.returncode == 128 + signal.SIGINT
