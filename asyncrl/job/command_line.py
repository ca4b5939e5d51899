"""The command line of a run, made from the fields of Config: their titles, texts, types and defaults. What a user
brings (FILE.py:NAME) is found and looked at here, before anything heavy starts.

argparse and not tyro, which cannot group the options of a flat dataclass in its help, and answers a mistake by a box.
"""

import argparse
import functools
import inspect
import itertools
import os
import re
import sys
import types
import typing
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from asyncrl import extras
from asyncrl import user_code as own
from asyncrl.config import Config, flag, nearest
from asyncrl.engine.score import load_score
from asyncrl.tasks import prepare_task

_FIELD = re.compile(r'^    # (.+)$|^    (\w+): .+\n    """([^"]+)"""$', re.MULTILINE)
_KINDS = {int: "a whole number", float: "a number", str: "a text"}


def parse_config(args: list[str] | None = None) -> Config:
    """Read the command line (`args`, or sys.argv) into a checked Config.

    Exits with status 2 and one line that says what was got, what is allowed and what to change.
    """
    try:
        dry, args = _dry_run_options().parse_known_args(args)
        config = read_options(args).checked()
        check(config)
        if not vars(dry):
            return config
        if "dry_run" not in dry:
            raise ValueError(f"--gpus {dry.gpus} is for --dry-run; a run has those of CUDA_VISIBLE_DEVICES")
        planning = extras.load("--dry-run")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(*planning.dry_run(config, vars(dry).get("gpus")), sep="\n")
        raise SystemExit(0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_options(args: list[str] | None = None, default: Config | None = None) -> Config:
    """Read options on top of `default`; what they say together is not checked yet. Raises ValueError, in one line."""
    args = sys.argv[1:] if args is None else args
    args = [re.sub(r"^--\w[\w-]*", lambda found: flag(found[0]), arg) for arg in args]  # --async_ratio is meant well
    if {"-h", "--help"} & set(args) and (algo := _value_of("--algo", args)):
        from asyncrl.trainer.loss import describe

        print(describe(own.resolved(algo)))
        raise SystemExit(0)
    given, unknown = _make_parser(default or Config()).parse_known_args(args)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [f"--{flag(field)}" for _, field, _ in option_texts() if field] + ["--like", "--dry-run", "--gpus"]
        word = re.escape(name.strip("-").replace("-", "_"))  # may belong to one loss, schedule or the like
        of = [f"; write --{flag(f)} {word}=VALUE" for _, f, text in option_texts() if re.search(rf"\b{word}=", text)]
        raise ValueError(f"{name} is no option{(*of, nearest(name, known))[0]}; --help lists all")
    chosen = resolved({name: tuple(v) if isinstance(v, list) else v for name, v in vars(given).items()})
    like = chosen.pop("like", None)
    if chosen.get("resume"):
        if like:
            raise ValueError("--like does not go with --resume, which takes the run's options; leave one of them out")
        from asyncrl.job.resume import resumed_config

        return resumed_config(chosen)
    if default or like:
        return replace(options_like(Path(like)) if like else default, **chosen)
    return with_lengths(Config(**chosen), chosen)


def resolved(options: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Options with absolute paths, so that all processes mean one file, and `environment:` before a class of
    gymnasium's. Raises ValueError, in one line, for a task that does not load."""
    found = dict(options)
    for name in options.keys() & {"algo", "task", "optimizer"}:
        found[name] = own.resolved(options[name])
    if "reward" in options:
        found["reward"] = tuple(map(own.resolved, options["reward"]))
    task = found.get("task", "")
    if own.is_own(task) and not task.startswith("environment:"):
        kind, gymnasium = own.load(task), sys.modules.get("gymnasium")
        if gymnasium and isinstance(kind, type) and issubclass(kind, gymnasium.Env):
            found["task"] = f"environment:{task}"
    return found


def check(config: Config) -> None:
    """Raise ValueError, in one line, for what a loss, an optimizer or a task does not take, or what of the user's own
    is unfit."""
    from asyncrl.trainer.loss import choose_loss, try_loss
    from asyncrl.trainer.optimizer import try_optimizer

    loss = choose_loss(config)
    with own.blamed(config.algo, "--algo"):
        try_loss(loss)
    try_optimizer(config)
    prepare_task(config.task, config.seed, config.data_path, config.task_args)
    if not config.is_multi_turn:
        load_score(config.task, config.reward)
    if config.is_baseline:
        extras.load("--scheduling")
    own.files(own.texts_of(config))
    if config.listen is not None:
        extras.load("--listen")


def with_lengths(config: Config, given: Collection[str]) -> Config:
    """The options with the longest prompt and response, as far as none are `given`, that suit what is not a toy."""
    if config.model == Config.model:
        return config
    lengths = {"max_prompt_tokens": 512, "max_response_tokens": 24 if config.task.startswith("sums") else 1024}
    return replace(config, **{name: length for name, length in lengths.items() if name not in given})


def options_like(run: Path) -> Config:
    """The options of a run, for another one. Raises ValueError, in one line, if no run of this code is there."""
    from asyncrl.job.resume import recorded

    return replace(Config.from_dict(recorded(run, "--like")["config"]), run_name=None, resume=None)


def _value_of(option: str, args: list[str]) -> str | None:
    """What an argument gives an option, as in `--algo tis` or `--algo=tis`."""
    after = [later for arg, later in itertools.pairwise(args) if arg == option and not later.startswith("-")]
    return next(iter([*after, *(arg.partition("=")[2] for arg in args if arg.startswith(f"{option}="))]), None)


def _make_parser(default: Config) -> argparse.ArgumentParser:
    parser = _Parser(None, "%(prog)s [options]", Config.__doc__, parents=[_dry_run_options()], allow_abbrev=False)
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


def _dry_run_options() -> argparse.ArgumentParser:
    """Options that are none of a run's."""
    options = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    options.add_argument("--dry-run", action="store_true", help="print placement, memory and a predicted step, and end")
    options.add_argument("--gpus", metavar="8xH100", help="GPUs to plan for; unset takes those of this machine")
    return options


@functools.cache  # to read the source takes longer than the whole command line
def option_texts() -> list[tuple[str, str, str]]:
    """Title of a group, or name and text of an option, in the order of asyncrl/config.py."""
    return _FIELD.findall(inspect.getsource(Config))


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
