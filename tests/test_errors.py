"""A mistake of a user ends in one line that says what was given, what is allowed, what to change: errors.toml.

An optional system has an errors.toml beside its own tests.
"""

import pkgutil
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from asyncrl.job.command_line import parse_config

FOLDER = Path(__file__).parent
FILES = [FOLDER / "errors.toml", *sorted(FOLDER.parent.glob("extras/*/tests/errors.toml"))]
ERRORS = [tomllib.loads(file.read_text(encoding="utf-8")) for file in FILES]
COMMANDS = [row for errors in ERRORS for row in errors.get("command", {}).items()]
CALLS = [error for errors in ERRORS for error in errors.get("call", [])]


def is_line(text, line):
    """Whether a text is this line, in which "…" stands for any text."""
    return re.fullmatch(re.escape(line).replace("…", ".+"), text) is not None


@pytest.mark.parametrize(("command", "line"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_mistake_on_the_command_line_ends_in_its_line(command, line, capsys):
    with pytest.raises(SystemExit) as end:
        parse_config(shlex.split(command))
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert is_line(text, f"error: {line}\n"), text


@pytest.mark.parametrize("error", CALLS, ids=lambda error: error["function"])
def test_a_mistake_in_a_call_raises_its_line(error):
    with pytest.raises(ValueError) as caught:
        pkgutil.resolve_name(error["function"])(**error["arguments"])
    assert is_line(str(caught.value), error["line"]), caught.value
