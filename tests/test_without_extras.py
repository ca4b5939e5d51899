"""In a copy of the repository without optional systems, their options end in one line.

That a copy without all of them trains is in test_end_to_end.py.
"""

from programs import run_python
from real_job import copy_without

COMMANDS = (
    ("swarm", "train_async.py", "--listen", "127.0.0.1:7711"),
    ("swarm", "rollout.py", "--join", "127.0.0.1:7711", "--key", "swarm.key"),
)
"""An optional system, and a command that needs it."""


def test_options_of_what_is_missing_end_in_one_line(tmp_path):
    folder = copy_without(tmp_path, *{name for name, *_ in COMMANDS}, "simulation")
    for name, *words in COMMANDS:
        ended = run_python(*words, cwd=folder, PYTHONPATH=str(folder))
        output = ended.stdout + ended.stderr
        assert ended.returncode and output.count("\n") == 1, output
        option = words[1].partition(":")[0].replace("=", " ")
        assert output.startswith(f"error: {option} needs extras/{name}/"), output
