import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def write_run(path, async_ratio, accuracies, step_s):
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"config": {"async_ratio": async_ratio}}))
    lines = [
        {
            "step": step,
            "samples": step * 8,
            "reward/mean": 0.5,
            "eval/accuracy": accuracy,
            "eval/policy_version": step,
            "staleness/mean": async_ratio,
            "staleness/max": async_ratio,
            "tokens/generated": 100 * step,
            "time/step_s": step_s,
            "time/wait_s": step_s / 4,
        }
        for step, accuracy in enumerate(accuracies, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_runs_with_the_same_value_share_a_row_with_mean_and_standard_deviation(tmp_path):
    runs = [
        write_run(tmp_path / "a", 1.0, [0.25, 0.5], step_s=2.0),
        write_run(tmp_path / "b", 1.0, [0.25, 0.75], step_s=2.0),
        write_run(tmp_path / "c", 0.0, [0.25, 1.0], step_s=4.0),
    ]
    command = [sys.executable, "scripts/table.py", *runs, "--by", "async_ratio"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    _, _, synchronous, asynchronous = done.stdout.splitlines()
    assert synchronous == "| 0 | 1 | 0.250 | 1.000 | 0.00 | 0 | 4.00 | 25 | 25% |"
    assert asynchronous == "| 1 | 2 | 0.250 | 0.625 ± 0.177 | 1.00 | 1 | 2.00 | 50 | 25% |"


def test_a_directory_that_is_no_run_is_one_line(tmp_path):
    command = [sys.executable, "scripts/table.py", str(tmp_path), "--by", "async_ratio"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
