"""In a copy of the repository without an optional system, its options end in one line.

That a copy without all of them trains is in test_end_to_end.py.
"""

import pytest
from programs import run_python
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


def test_its_options_end_in_one_line(copy):
    name, folder = copy
    for arguments in OPTIONS_OF[name]:
        ended = run_python(*arguments, cwd=folder, PYTHONPATH=str(folder))
        output = ended.stdout + ended.stderr
        assert ended.returncode and output.count("\n") == 1, output
        option = arguments[1].partition(":")[0].replace("=", " ")
        assert output.startswith(f"error: {option} needs extras/{name}/"), output
