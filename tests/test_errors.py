"""A mistake of a user ends in one line that says what was given, what is allowed, what to change: errors.toml.

An optional system has an errors.toml beside its own tests.
"""

import pkgutil
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import user_files

from asyncrl.job.command_line import parse_config

FOLDER = Path(__file__).parent
FILES = [FOLDER / "errors.toml", *sorted(FOLDER.parent.glob("extras/*/tests/errors.toml"))]
ERRORS = [tomllib.loads(file.read_text(encoding="utf-8")) for file in FILES]
COMMANDS = [row for errors in ERRORS for row in errors.get("command", {}).items()]
CALLS = [error for errors in ERRORS for error in errors.get("call", [])]
USER_CODE = [error for errors in ERRORS for error in errors.get("user_code", [])]


def is_line(text, line):
    """Whether a text is this line, in which "…" stands for any text."""
    return re.fullmatch(re.escape(line).replace("…", ".+"), text) is not None


def error_of(command, capsys):
    """What a command line ends with, before anything is started or written."""
    with pytest.raises(SystemExit) as end:
        parse_config(shlex.split(command))
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("command", "line"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_mistake_on_the_command_line_ends_in_its_line(command, line, capsys):
    text = error_of(command, capsys)
    assert is_line(text, f"error: {line}\n"), text


@pytest.mark.parametrize("error", CALLS, ids=lambda error: error["function"])
def test_a_mistake_in_a_call_raises_its_line(error):
    with pytest.raises(ValueError) as caught:
        pkgutil.resolve_name(error["function"])(**error["arguments"])
    assert is_line(str(caught.value), error["line"]), caught.value


@pytest.mark.parametrize("error", USER_CODE, ids=lambda error: error["line"])
def test_a_mistake_in_user_code_ends_in_its_line(error, tmp_path, monkeypatch, capsys):
    for name, source in error.get("files", {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        source = getattr(user_files, source, source)
        for old, new in error.get("changes", []):
            source = source.replace(old, new)
        path.write_text(source)
    monkeypatch.chdir(tmp_path)
    if "command" in error:
        text = error_of(error["command"], capsys)
    else:
        with pytest.raises(ValueError) as caught:
            user_files.ask_task(**error["task"])
        text = f"error: {caught.value}\n"
    text = text.replace(str(tmp_path), "FOLDER")
    assert is_line(text, f"error: {error['line']}\n"), text
