"""The command line of a run, made from the fields of Config: their titles, texts, types and defaults.

argparse and not tyro, which cannot group the options of a flat dataclass in its help, and answers a mistake by a box.
"""

import argparse
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from config import Config, flag, nearest
from data import own
from job.brought import check, resolved

_FIELD = re.compile(r'^    # (.+)$|^    (\w+): .+\n    """([^"]+)"""$', re.MULTILINE)
_KINDS = {int: "a whole number", float: "a number", str: "a text"}


def parse_config(args: list[str] | None = None) -> Config:
    """Read the command line (`args`, or sys.argv) into a checked Config.

    Exits with status 2 and one line that says what was got, what is allowed and what to change.
    """
    try:
        config = read_options(args).checked()
        check(config)
        return config
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_options(args: list[str] | None = None, default: Config | None = None) -> Config:
    """Read options on top of `default`; what they say together is not checked yet. Raises ValueError, in one line."""
    args = sys.argv[1:] if args is None else args
    args = [re.sub(r"^--\w[\w-]*", lambda found: flag(found[0]), arg) for arg in args]  # --async_ratio is meant well
    if {"-h", "--help"} & set(args) and (algo := _value_of("--algo", args)):
        from algos import LOSSES
        from algos.own_loss import describe

        print(describe(algo, own.load(own.resolved(algo), "--algo", LOSSES)))
        raise SystemExit(0)
    given, unknown = _make_parser(default or Config()).parse_known_args(args)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [f"--{flag(field)}" for _, field, _ in option_texts() if field] + ["--like"]
        raise ValueError(f"{name} is no option{nearest(name, known)}; --help lists all")
    chosen = resolved({name: tuple(v) if isinstance(v, list) else v for name, v in vars(given).items()})
    like = chosen.pop("like", None)
    if chosen.get("resume"):
        if like:
            raise ValueError("--like does not go with --resume, which takes the run's options; leave one of them out")
        from job.resume import resumed_config  # and with it what only a resumed run needs

        return resumed_config(chosen)
    if default or like:
        return replace(options_like(Path(like)) if like else default, **chosen)
    return with_lengths(Config(**chosen), chosen)


def with_lengths(config: Config, given: Collection[str]) -> Config:
    """The options with the longest prompt and response, as far as none are `given`, that suit what is not a toy."""
    if config.model == Config.model:
        return config
    lengths = {"max_prompt_tokens": 512, "max_response_tokens": 24 if config.task.startswith("sums") else 1024}
    return replace(config, **{name: length for name, length in lengths.items() if name not in given})


def options_like(run: Path) -> Config:
    """The options of a run, for another one. Raises ValueError, in one line, if no run of this code is there."""
    from job.resume import recorded

    return replace(Config.from_dict(recorded(run, "--like")["config"]), run_name=None, resume=None)


def _value_of(option: str, args: list[str]) -> str | None:
    """What an argument gives an option, as in `--algo tis` or `--algo=tis`."""
    after = [later for arg, later in itertools.pairwise(args) if arg == option and not later.startswith("-")]
    return next(iter([*after, *(arg.partition("=")[2] for arg in args if arg.startswith(f"{option}="))]), None)


def _make_parser(default: Config) -> argparse.ArgumentParser:
    parser = _Parser(usage="%(prog)s [options]", description=Config.__doc__, allow_abbrev=False)
    group, types_of = parser, typing.get_type_hints(Config)
    for title, name, text in option_texts():
        if title:
            group = parser.add_argument_group(title)
            continue
        value = getattr(default, name)
        shown = (" ".join(value) or "none") if isinstance(value, tuple) else value
        text = f"{' '.join(text.split())} (default: {shown})".replace("%", "%%")
        group.add_argument(f"--{flag(name)}", default=argparse.SUPPRESS, help=text, **_form(types_of[name]))
    what = "take the options of another run, runs/NAME, as defaults"
    parser.add_argument("--like", metavar="RUN", default=argparse.SUPPRESS, help=what)
    return parser


def option_texts() -> Iterator[tuple[str, str, str]]:
    """Title of a group, or name and text of an option, in the order of config.py."""
    return (found.groups(default="") for found in _FIELD.finditer(inspect.getsource(Config)))


def _form(kind) -> dict:
    """What argparse needs to read a value of this type, and to show it."""
    if kind in (bool, bool | None):
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is tuple:
        return _form(typing.get_args(kind)[0]) | {"nargs": "*", "action": "extend"}
    is_optional = typing.get_origin(kind) is types.UnionType
    kind = typing.get_args(kind)[0] if is_optional else kind
    choices = typing.get_args(kind)
    metavar = "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()

    def read(text: str):
        if choices and text not in choices:
            what = f"must be one of {', '.join(choices)}, got {text!r}{nearest(text, choices)}"
            raise argparse.ArgumentTypeError(what)
        try:
            return None if is_optional and text == "None" else text if choices else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {_KINDS[kind]}, got {text!r}") from None

    return {"metavar": metavar, "type": read}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        """Raise what argparse would print below a usage of all options."""
        raise ValueError(re.sub(r"^argument (\S+): ", r"\1 ", message))
