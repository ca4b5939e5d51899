"""What each tracker has on its disk of a run that was resumed: every step once."""

import contextlib
import importlib.util
import json
import re
import sqlite3

import pytest
import wandb  # noqa: F401  later, a finalizer's traceback can make CPython 3.11 fail to parse it

from asyncrl.config import Config
from asyncrl.job.command_line import parse_config
from asyncrl.runlog.manifest import ResumePoint
from asyncrl.runlog.run_directory import RunDirectory


@pytest.fixture
def resumed_run(tmp_path):
    """Return a function that makes three steps with a tracker, then resumes after step 1 and makes step 2 again."""

    def run(**options):
        config = Config(runs_dir=str(tmp_path), run_name="one", **options)
        directory = RunDirectory(config)
        for step in (1, 2, 3):
            directory.log_metrics({"step": step, "reward/mean": step / 8, "eval/earlier": [{}]})
            if step == 1:
                checkpoint = ResumePoint(1, directory.record_bytes(), [])
        directory.close()
        directory = RunDirectory(config, resume_point=checkpoint)
        directory.continue_records()
        directory.log_metrics({"step": 2, "reward/mean": 1.5})
        directory.close()
        return directory.path

    return run


def test_wandb_continues_in_the_same_run(resumed_run):
    path = resumed_run(tracker="wandb", tracker_mode="offline")
    folders = (path / "wandb").glob("offline-run-*")
    ids = {re.match(r"offline-run-\w+-(\w+)", folder.name)[1] for folder in folders}
    assert ids == {json.loads((path / "run.json").read_text())["run_id"]}


def test_wandb_without_a_key_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = Config(runs_dir=str(tmp_path), tracker="wandb", tracker_project="mine")
    with pytest.raises(ValueError, match=r"^--tracker wandb: .*; run `wandb login`") as refusal:
        RunDirectory(config)
    assert "\n" not in str(refusal.value)


def test_the_event_reader_of_tensorboard_finds_each_step_once(resumed_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = resumed_run(tracker="tensorboard")
    events = EventAccumulator(str(path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    points = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert points == [(1, 0.125), (2, 1.5)]


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command(tracker, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--tracker", tracker])
    line = f"error: --tracker {tracker} needs the package {tracker}: pip install {tracker}=="
    assert capsys.readouterr().err.startswith(line)


def test_the_database_of_trackio_has_each_step_once(resumed_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by the import
    path = resumed_run(tracker="trackio", tracker_project="mine")
    run_id = json.loads((path / "run.json").read_text())["run_id"]
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio/mine.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step")
        points = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    assert points == [
        (f"one-{run_id}", 1, {"reward/mean": 0.125}),
        (f"one-{run_id}", 2, {"reward/mean": 1.5}),
    ]
