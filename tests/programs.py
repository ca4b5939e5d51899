"""Runs Python programs as a user does, and waits for what others do."""

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*words: str | Path, cwd: Path = ROOT, **variables) -> subprocess.CompletedProcess:
    """Run Python with these words, in the environment of the tests but for some variables, and without a GPU."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def start_python(*words: str | Path, **options) -> subprocess.Popen:
    """Start Python with these words; text goes to it and comes from it by pipes."""
    options = {"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, *words], text=True, **options)


def run_script(monkeypatch, script: str, *words: str | Path) -> None:
    """Run a script of scripts/ in this process. Raises SystemExit, as it does for a mistake."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, poll_s: float = 0.01
) -> object:
    """Poll until the condition gives something, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"nothing after {timeout_s:g} s"
        time.sleep(poll_s)
    return result
