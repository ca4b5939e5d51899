"""The table of optional systems: what it names is there, and what is not there is said in one line."""

import pytest

from asyncrl import extras


@pytest.mark.parametrize("option", extras.MODULES)
def test_every_module_of_the_table_is_there(option):
    assert extras.load(option).__name__ == extras.MODULES[option]


@pytest.mark.parametrize("module", ["extras.nowhere.dry_run", "extras.planning.nowhere"])
def test_an_option_whose_module_is_missing_is_refused_in_one_line(monkeypatch, module):
    monkeypatch.setitem(extras.MODULES, "--dry-run", module)
    assert extras.find("--dry-run") is None
    with pytest.raises(ValueError, match=r"--dry-run needs extras/\w+/\w+\.py, which this copy of the code lacks; .*$"):
        extras.load("--dry-run")
