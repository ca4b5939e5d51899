"""The table of optional systems: what it names is there, and what is not there is said in one line."""

import pytest

from asyncrl import extras
from asyncrl.job.command_line import parse_config

OPTIONS_OF_LINES = {"--no-replicate-prompts": "--scheduling", "--advantage gae": "--advantage gae"}
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
        "--lora-rank 2",
        "--advantage gae",
        "--optim.balance 0.01",
        "--record",
        "--wandb offline",
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
