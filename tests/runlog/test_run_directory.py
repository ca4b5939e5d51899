import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from programs import start_python

from asyncrl.config import Config
from asyncrl.runlog import header
from asyncrl.runlog.header import git
from asyncrl.runlog.record_file import RecordFile
from asyncrl.runlog.run_directory import RunDirectory
from scripts.lines import read


def test_changes_of_the_code_have_new_files_of_it_too_and_no_others(tmp_path, monkeypatch):
    def run_git(*words):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    run_git("init")
    (tmp_path / "algos").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "algos/old.py").write_text("old = 1\n")
    run_git("add", ".")
    run_git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "Add old")
    monkeypatch.setattr(header, "ROOT", tmp_path)
    monkeypatch.setattr(header, "git", lambda *words: real_git("-C", str(tmp_path), *words))
    real_git = git
    assert header.uncommitted_changes() == ""
    (tmp_path / "algos/new.py").write_text("new = 2\n")
    (tmp_path / "mine/other.py").write_text("other = 3\n")
    assert header.uncommitted_changes().splitlines()[-1] == "+new = 2"
    (tmp_path / "algos/old.py").write_text("old = 4\n")
    changes = header.uncommitted_changes()
    assert "+old = 4" in changes and "+new = 2" in changes and "other" not in changes


TAKEN = r"(one|node_1) exists; give another --run-name"


def make_run(folder, name="one", **options):
    return RunDirectory(Config(runs_dir=str(folder), run_name=name, lr=0.25), **options)


@pytest.mark.parametrize("node_folder", ["", "one/node_1"])
def test_a_run_that_ended_before_its_first_step_gives_its_name_back_and_no_other_is_overwritten(
    tmp_path, node_folder
):
    arguments = f"Config(runs_dir={str(tmp_path)!r}, run_name='one'), node_folder={node_folder!r}"
    code = (
        "from asyncrl.config import Config\nfrom asyncrl.runlog.run_directory import RunDirectory\n"
        f"run = RunDirectory({arguments})\nprint('made', flush=True)\ninput()"
    )
    with start_python("-c", code) as other:
        assert other.stdout.readline() == "made\n"
        with pytest.raises(ValueError, match=TAKEN):
            make_run(tmp_path, node_folder=node_folder)
        other.kill()
    run = make_run(tmp_path, node_folder=node_folder)
    run.close(ValueError("the gradient is not finite"))
    kept = run.path / "failed_step_1"
    kept.mkdir()
    with pytest.raises(ValueError, match=TAKEN):
        make_run(tmp_path, node_folder=node_folder)
    kept.rmdir()
    run = make_run(tmp_path, node_folder=node_folder)
    assert [event["event"] for event in read(run.path / "events.jsonl")] == ["run_started"]
    with pytest.raises(ValueError, match=TAKEN):
        make_run(tmp_path, node_folder=node_folder)  # it has made no step, but may be about to
    run.record_event("step", step=1)
    run.close()
    with pytest.raises(ValueError, match=TAKEN):
        make_run(tmp_path, node_folder=node_folder)


def test_a_run_records_how_it_was_made_and_ended_and_every_line_is_json_on_disk_at_once(tmp_path):
    run = make_run(tmp_path)
    header = json.loads((run.path / "run.json").read_text())
    assert header["config"]["lr"] == 0.25 and header["packages"]["torch"]
    assert header["hardware"]["cpu_cores"] >= 1
    assert "/" not in header["command"][0], "where python lies is nobody's business"
    run.log_metrics({"step": 1, "a": float("nan"), "b": np.float32(0.5), "c": float("inf")})
    assert read(run.path / "metrics.jsonl") == [{"step": 1, "a": None, "b": 0.5, "c": None}]
    run.record_event("trajectory", reward=np.float64(0.5), turns=((1.0, 2.5, 3.0),))
    event = read(run.path / "events.jsonl")[1]
    assert (event["event"], event["reward"]) == ("trajectory", 0.5)
    assert event["turns"] == [[1.0, 2.5, 3.0]] and event["time"] > 0
    run.close(RuntimeError("no batch\nand more"))
    ended = read(run.path / "events.jsonl")[-1]
    assert (ended["status"], ended["reason"]) == ("ended early", "RuntimeError: no batch")
    run.record_event("a record that comes after the end is no error")


def test_changes_of_the_code_are_recorded_whatever_bytes_they_have(tmp_path, monkeypatch):
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nprintf 'caf\\351'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git("diff") == "caf\\xe9"


def test_a_line_with_half_a_character_can_be_read_and_has_all_its_fields(tmp_path):
    run = make_run(tmp_path)
    sample = {"failure": "no \ud83d", "reward": np.float32(0.5), "parts": {"\udcff": float("nan")}}
    run.log_sample(**sample)
    run.close()
    (line,) = read(run.path / "samples.jsonl")
    assert line == {"failure": "no \\ud83d", "reward": 0.5, "parts": {"\\udcff": None}}


def test_a_directory_that_is_deleted_under_a_run_and_a_full_disk_end_it_at_the_next_line(tmp_path):
    run, node = make_run(tmp_path), make_run(tmp_path, node_folder="two/node_1")
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    was_deleted = "was deleted under the run that writes it"
    with pytest.raises(OSError, match=rf"one/metrics\.jsonl {was_deleted}"):
        run.log_metrics({"step": 1})
    with pytest.raises(OSError, match=rf"node_1/events\.jsonl {was_deleted}"):
        node.record_event("update", worker=0)
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        RecordFile(Path("/dev/full")).append({"step": 1})
