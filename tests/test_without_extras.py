"""In a copy of the repository without an optional system, its options end in one line.

That a copy without all of them trains is in test_end_to_end.py.
"""

import os
import subprocess
import sys

import pytest
from real_job import copy_without

OPTIONS_OF = {
    "swarm": (
        ["train_async.py", "--listen", "127.0.0.1:7711"],
        ["rollout.py", "--join", "127.0.0.1:7711", "--key", "swarm.key"],
    ),
    "planning": (["train_async.py", "--dry-run"],),
    "simulation": (),
    "agents": (["train_async.py", "--task=agent:guess.py:run"],),
}


@pytest.fixture(scope="module", params=OPTIONS_OF)
def copy(request, tmp_path_factory):
    """The name of an optional system, and the folder of a copy without it."""
    return request.param, copy_without(tmp_path_factory.mktemp(request.param), request.param)


def run(folder, arguments):
    alone = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | alone,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_its_options_end_in_one_line(copy):
    name, folder = copy
    for arguments in OPTIONS_OF[name]:
        status, output = run(folder, arguments)
        assert status and output.count("\n") == 1, output
        option = arguments[1].partition(":")[0].replace("=", " ")
        assert output.startswith(f"error: {option} needs extras/{name}/"), output
