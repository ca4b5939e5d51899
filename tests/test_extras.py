"""The table of optional systems: what it names is there, and what is not there is said in one line."""

import pytest

from asyncrl import extras
from asyncrl.job.command_line import parse_config


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
    "line", ["--scheduling batch", "--scheduling lockstep", "--no-replicate-prompts"]
)
def test_a_baseline_whose_file_is_missing_is_refused_in_one_line(monkeypatch, capsys, line):
    assert parse_config(line.split()).is_baseline
    monkeypatch.setitem(extras.MODULES, "--scheduling", "extras.nowhere")
    assert not parse_config([]).is_baseline, "the default needs no optional system"
    with pytest.raises(SystemExit, match="2"):
        parse_config(line.split())
    message = "error: --scheduling needs extras/nowhere.py, which this copy of the code lacks; bring it back, or leave"
    assert capsys.readouterr().err.startswith(message)
