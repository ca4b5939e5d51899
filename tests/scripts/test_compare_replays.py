import json
import subprocess
import sys
from pathlib import Path

from scripts.compare_replays import read_recorded, read_records, table

ROOT = Path(__file__).parents[2]


def write_run(path, seed, accuracy):
    """A recorded run of ten steps: only the last one, a tenth of them, counts for the means."""
    (path / "checkpoints" / "step_10").mkdir(parents=True)
    (path / "checkpoints" / "step_10" / "model.safetensors").write_bytes(b"weights")
    header = {"command": ["torchrun", "train_async.py"], "git_commit": "0" * 40, "git_diff": "", "hardware": {}}
    config = {"config": {"algo": "grpo", "seed": seed}, "packages": {}}
    (path / "run.json").write_text(json.dumps(header | config))
    lines = [
        {"step": s, "drift/k3": s / 8, "loss/entropy": 0.5, "loss/ess": 1.0, "loss/grad_norm": 0.1}
        for s in range(1, 11)
    ]
    lines[0] |= {"eval/accuracy": 0.0, "eval/policy_version": 0}
    lines[-1] |= {"eval/accuracy": accuracy, "eval/policy_version": 10}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_and_their_replays_are_rows_with_means_over_the_runs(tmp_path):
    runs = [read_recorded(write_run(tmp_path / f"run-{seed}", seed, 0.25 + seed / 2)) for seed in (0, 1)]
    replays = [run | {"kind": "replay", "algo": "tis", "accuracy": 1.0} for run in runs]
    assert table([runs[0], replays[0], runs[1], replays[1]])[2:] == [
        "| recorded run, `grpo` | 2 | 0.500 ± 0.354 | 1.2500 | 0.500 | 1.000 |",
        "| `tis` | 2 | 1.000 | 1.2500 | 0.500 | 1.000 |",
    ]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"] and runs[0]["command"] == "torchrun train_async.py"


def test_a_replay_that_fails_ends_it_with_its_reason_and_keeps_what_was_made(tmp_path):
    run = write_run(tmp_path / "run", 0, 0.5)
    command = [sys.executable, "scripts/compare_replays.py", run, "--algos", "tis", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ended with status 2: error: " in done.stderr and "was not recorded" in done.stderr
    assert [record["kind"] for record in read_records(tmp_path / "out")] == ["recorded run"]
