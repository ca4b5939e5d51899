"""The table of optional systems: what it names is there, and what is not there is said in one line."""

import pytest
from programs import run_python
from real_job import copy_without

from asyncrl import extras
from asyncrl.job.command_line import parse_config

OPTIONS_OF_LINES = {
    "--no-replicate-prompts": "--scheduling",
    "--task guess_number": "--task environment",
}
"""Lines whose option in the table is not their first word."""


@pytest.mark.parametrize("option", extras.MODULES)
def test_every_module_of_the_table_is_there(option):
    assert extras.load(option).__name__ == extras.MODULES[option]


@pytest.mark.parametrize("module", ["extras.nowhere.dry_run", "extras.planning.nowhere"])
def test_an_option_whose_module_is_missing_is_refused_in_one_line(monkeypatch, module):
    monkeypatch.setitem(extras.MODULES, "--dry-run", module)
    assert extras.find("--dry-run") is None
    with pytest.raises(
        ValueError,
        match=r"--dry-run needs extras/\w+/\w+\.py, which this copy of the code lacks; .*$",
    ):
        extras.load("--dry-run")


@pytest.mark.parametrize(
    "line",
    [
        "--scheduling batch",
        "--scheduling lockstep",
        "--no-replicate-prompts",
        "--optim.seq-aux-loss-coef 0.01",
        "--share-prefix tree",
        "--task guess_number",
        "--record",
        "--tracker wandb",
        "--listen 127.0.0.1:1",
    ],
)
def test_an_option_whose_file_is_missing_is_refused_in_one_line(monkeypatch, capsys, line):
    option = OPTIONS_OF_LINES.get(line, line.split()[0])
    assert parse_config(line.split()) != parse_config([])
    monkeypatch.setitem(extras.MODULES, option, "extras.nowhere")
    parse_config([])  # the default needs no optional system
    with pytest.raises(SystemExit, match="2"):
        parse_config(line.split())
    message = f"error: {option} needs extras/nowhere.py, which this copy of the code lacks"
    assert capsys.readouterr().err.startswith(message)


def test_commands_in_a_copy_without_a_folder_end_in_one_line(tmp_path):
    """test_end_to_end.py trains in a copy without all of them."""
    folder = copy_without(tmp_path, "swarm", "simulation")
    for words in ("train_async.py --listen h:1", "rollout.py --join h:1 --key swarm.key"):
        script, option, *values = words.split()
        ended = run_python(script, option, *values, cwd=folder, PYTHONPATH=str(folder))
        output = ended.stdout + ended.stderr
        assert ended.returncode and output.count("\n") == 1, output
        assert output.startswith(f"error: {option} needs extras/swarm/"), output
