"""The command line of a run, made from the fields of Config: their titles, texts, types and defaults."""

import argparse
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import replace

from config import Config, flag, nearest

_FIELD = re.compile(r'^    # (.+)$|^    (\w+): .+\n    """([^"]+)"""$', re.MULTILINE)
_METAVARS = {int: ("INT", "a whole number"), float: ("FLOAT", "a number"), str: ("TEXT", "a text")}


def parse_config(args: list[str] | None = None) -> Config:
    """Read the command line (`args`, or sys.argv) into a checked Config.

    Exits with status 2 and one line that says what was got, what is allowed and what to change.
    """
    try:
        return read_options(args).checked()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_options(args: list[str] | None = None, default: Config | None = None, prog: str | None = None) -> Config:
    """Read options on top of `default`; what they say together is not checked yet. Raises ValueError, in one line."""
    args = [
        re.sub(r"^--\w[\w-]*", lambda found: flag(found[0]), arg) for arg in (sys.argv[1:] if args is None else args)
    ]
    default = default or Config()
    parser = _Parser(prog, "%(prog)s [options]", Config.__doc__, allow_abbrev=False, formatter_class=_formatter)
    types_of, group = typing.get_type_hints(Config), parser
    for title, name, text in _fields():
        if title:
            group = parser.add_argument_group(title)
            continue
        value = getattr(default, name)
        shown = " ".join(value) if isinstance(value, tuple) else value
        text = f"{' '.join(text.split())} (default: {'none' if shown in (None, '') else shown})".replace("%", "%%")
        group.add_argument(f"--{flag(name)}", default=argparse.SUPPRESS, help=text, **_form(types_of[name]))
    given, unknown = parser.parse_known_args(args)
    if unknown:
        name = unknown[0].partition("=")[0]
        raise ValueError(f"{name} is no option{nearest(name, [f'--{flag(n)}' for n in types_of])}; --help lists all")
    return replace(default, **{n: tuple(v) if isinstance(v, list) else v for n, v in vars(given).items()})


def _fields() -> Iterator[tuple[str, str, str]]:
    """Title of a group, or name and text of an option, in the order of config.py."""
    return (found.groups(default="") for found in _FIELD.finditer(inspect.getsource(Config)))


def _form(kind) -> dict:
    """What argparse needs to read a value of this type, and to show it."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is tuple:
        return _form(typing.get_args(kind)[0]) | {"nargs": "*"}
    is_optional = typing.get_origin(kind) is types.UnionType
    kind = typing.get_args(kind)[0] if is_optional else kind
    choices = typing.get_args(kind)
    metavar = "{" + ",".join(choices) + "}" if choices else _METAVARS[kind][0]
    return {"metavar": metavar, "type": functools.partial(_read, str if choices else kind, choices, is_optional)}


def _read(kind: type, choices: tuple[str, ...], is_optional: bool, text: str):
    if is_optional and text == "None":
        return None
    if choices and text not in choices:
        near = nearest(text, choices)
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, got {text!r}{near}")
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {_METAVARS[kind][1]}, got {text!r}") from None


_formatter = functools.partial(argparse.HelpFormatter, max_help_position=8)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        """Raise what argparse would print below a usage of all options."""
        raise ValueError(re.sub(r"^argument (\S+): ", r"\1 ", message))
