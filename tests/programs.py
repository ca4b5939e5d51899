"""Runs Python programs as a user does, to their end."""

import os
import subprocess
import sys
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
