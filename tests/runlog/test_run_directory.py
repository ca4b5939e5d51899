import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.runlog.record_file import RecordFile
from asyncrl.runlog.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]


def lines(run, name):
    return [json.loads(line) for line in (run.path / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_says_how_it_was_made(tmp_path):
    run = RunDirectory(Config(runs_dir=str(tmp_path), run_name="one", lr=0.25))
    record = json.loads((run.path / "run.json").read_text())
    assert (
        record["config"]["lr"] == 0.25
        and record["packages"]["torch"]
        and record["hardware"]["cpu_cores"] >= 1
    )
    assert "/" not in record["command"][0], "where python lies is nobody's business"
    run.close()


def test_an_earlier_run_is_never_overwritten(tmp_path):
    config = Config(runs_dir=str(tmp_path), run_name="one")
    run = RunDirectory(config)
    with pytest.raises(ValueError, match=r"one exists; give another --run-name"):
        RunDirectory(config)  # it has not made a step, but may be about to
    run.record("step", step=1)
    run.close(RuntimeError("no batch"))
    with pytest.raises(ValueError, match=r"one exists; give another --run-name"):
        RunDirectory(config)


def test_a_run_that_ended_before_its_first_step_gives_its_name_back(tmp_path):
    config = Config(runs_dir=str(tmp_path), run_name="one")
    RunDirectory(config).close(ValueError("a prompt has 133 tokens"))
    run = RunDirectory(config)
    assert [event["event"] for event in lines(run, "events")] == ["run_started"]
    run.close()


@pytest.mark.parametrize("node_folder", ["", "one/node_1"])
def test_a_run_that_was_killed_before_its_first_step_gives_its_name_back_and_one_that_goes_on_does_not(
    tmp_path, node_folder
):
    made = f"RunDirectory(Config(runs_dir={str(tmp_path)!r}, run_name='one'), node_folder={node_folder!r})"
    start = f"from asyncrl.config import Config\nfrom asyncrl.runlog.run_directory import RunDirectory\nrun = {made}\n"
    command = [sys.executable, "-c", start + "print('made', flush=True)\ninput()"]
    config = Config(runs_dir=str(tmp_path), run_name="one")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as other:
        assert other.stdout.readline() == b"made\n"
        with pytest.raises(ValueError, match=r"(one|node_1) exists; give another --run-name"):
            RunDirectory(config, node_folder=node_folder)
        other.kill()
    run = RunDirectory(config, node_folder=node_folder)
    run.record("step", step=1)
    run.close()
    with pytest.raises(ValueError, match=r"(one|node_1) exists; give another --run-name"):
        RunDirectory(config, node_folder=node_folder)


def test_a_run_that_is_resumed_keeps_its_events_until_the_checkpoint_and_writes_on(tmp_path):
    config = Config(runs_dir=str(tmp_path), run_name="one")
    run = RunDirectory(config)
    run.record("trajectory", reward=np.float64(0.5), turns=((1.0, 2.5, 3.0),))
    sizes = run.sizes()
    run.record("trajectory", reward=1.0)
    run.close()
    before = (run.path / "events.jsonl").read_bytes()
    run = RunDirectory(config, resumed={"step": 1, "records": sizes, "skipped": []})
    run.record("worker_started", worker=0)
    assert (run.path / "events.jsonl").read_bytes() == before, "no file is changed before the cut"
    run.cut_back()
    run.record("trajectory", reward=float("nan"), failure="no")
    run.close()
    events = lines(run, "events")
    kinds = [
        "run_started",
        "trajectory",
        "run_resumed",
        "worker_started",
        "trajectory",
        "run_ended",
    ]
    assert [event["event"] for event in events] == kinds
    assert (events[1]["reward"], events[1]["turns"]) == (0.5, [[1.0, 2.5, 3.0]])
    assert (events[4]["reward"], events[4]["failure"]) == (None, "no")


def test_a_run_that_has_not_ended_is_not_gone_on_with(tmp_path):
    config = Config(runs_dir=str(tmp_path), run_name="one")
    run = RunDirectory(config)
    resumed = {"step": 1, "records": {}, "skipped": []}
    with pytest.raises(ValueError, match="one is written by a run that has not ended"):
        RunDirectory(config, resumed=resumed)
    assert len(lines(run, "events")) == 1, "nothing is cut back"
    run.close()
    RunDirectory(config, resumed=resumed).close()


def test_every_line_is_on_disk_at_once_and_is_json_whatever_the_numbers(tmp_path):
    run = RunDirectory(Config(runs_dir=str(tmp_path)))
    run.log_metrics({"step": 1, "a": float("nan"), "b": np.float32(0.5), "c": float("inf")})
    assert lines(run, "metrics") == [{"step": 1, "a": None, "b": 0.5, "c": None}]
    run.record("worker_ready", worker=0)
    assert (
        lines(run, "events")[1]["event"] == "worker_ready" and lines(run, "events")[1]["time"] > 0
    )
    run.close()


def test_a_record_that_comes_after_the_end_is_no_error(tmp_path):
    run = RunDirectory(Config(runs_dir=str(tmp_path)))
    run.close()
    run.record("trajectory", ticket=1)
    assert [event["event"] for event in lines(run, "events")] == ["run_started", "run_ended"]


def test_another_node_writes_its_events_in_a_folder_of_its_own_and_overwrites_nothing(tmp_path):
    config = Config(runs_dir=str(tmp_path))
    records = RunDirectory(config, node_folder="one/node_1")
    records.record("update", worker=0, pause_s=float("nan"))
    records.close()
    records.record("too late")
    assert {path.name for path in (tmp_path / "one" / "node_1").iterdir()} == {
        "events.jsonl",
        "run.json",
    }
    _, event, ended = lines(records, "events")
    assert (event["event"], event["worker"], event["pause_s"]) == ("update", 0, None)
    assert (ended["event"], ended["status"]) == ("run_ended", "finished")
    RunDirectory(config, node_folder="one/node_2").close()
    with open(records.path / "events.jsonl", "a") as file:
        file.write('{"event": "step", "step": 1}\n')
    with pytest.raises(ValueError, match="node_1 exists"):
        RunDirectory(config, node_folder="one/node_1")


def test_a_run_says_how_it_ended_in_one_line(tmp_path):
    for name, error in (("good", None), ("bad", RuntimeError("no batch\nand more"))):
        run = RunDirectory(Config(runs_dir=str(tmp_path), run_name=name))
        run.close(error)
        ended = lines(run, "events")[-1]
        expected = ("ended early", "RuntimeError: no batch") if error else ("finished", "")
        assert (ended["status"], ended["reason"]) == expected


def test_a_directory_that_is_deleted_under_a_run_ends_it_at_the_next_line(tmp_path):
    run = RunDirectory(Config(runs_dir=str(tmp_path), run_name="one"))
    node = RunDirectory(Config(runs_dir=str(tmp_path)), node_folder="two/node_1")
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    with pytest.raises(
        OSError, match=r"one/metrics\.jsonl was deleted under the run that writes it"
    ):
        run.log_metrics({"step": 1})
    with pytest.raises(
        OSError, match=r"node_1/events\.jsonl was deleted under the run that writes it"
    ):
        node.record("update", worker=0)


def test_a_full_disk_is_named(tmp_path):
    run = RunDirectory(Config(runs_dir=str(tmp_path), run_name="one"))
    run._files["metrics"] = RecordFile(Path("/dev/full"))
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        run.log_metrics({"step": 1})
