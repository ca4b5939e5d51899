"""The figure and the printed summary of runs."""

import json
import subprocess
import sys
from pathlib import Path

from matplotlib.image import imread

ROOT = Path(__file__).parents[2]


def write_run(path, steps, evaluate):
    path.mkdir()
    (path / "run.json").write_text("{}")
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "samples": 4 * step, "reward/mean": 0.975, "staleness/mean": 0.5, "staleness/max": 1}
        line |= {"tokens/generated": 100 * step, "time/step_s": 2.0, "time/wait_s": 0.5}
        line |= {"time/train_s": 1.0, "time/publish_s": 0.5}
        lines.append(line | ({"eval/accuracy": 0.25, "eval/policy_version": step - 1} if evaluate else {}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plot(*arguments):
    command = [sys.executable, "scripts/plot.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_runs_are_summarised_beside_each_other_and_drawn_over_each_other(tmp_path):
    first, second = write_run(tmp_path / "one", 40, evaluate=True), write_run(tmp_path / "two", 1, evaluate=False)
    done = plot(first, second)
    assert done.returncode == 0, done.stderr
    assert "one" in done.stdout.splitlines()[0] and "25.0%" in done.stdout and "0.975" in done.stdout
    assert done.stdout.endswith(f"curves: {first / 'curves.png'}\n")
    pixels = imread(first / "curves.png")
    assert pixels.shape[1] >= 1200 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path):
    run = write_run(tmp_path / "one", 2, evaluate=False)
    for out, why in ((tmp_path / "none" / "x.png", "No such file"), (tmp_path / "x.nope", "is not supported")):
        done = plot(run, "--out", out)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert why in done.stderr


def test_a_directory_that_is_no_run_is_one_line(tmp_path):
    done = plot(tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
