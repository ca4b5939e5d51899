"""The command line of a run, made by tyro from the annotations of Config.

User code (FILE.py:NAME) is found and tried here, before anything heavy starts. tyro groups the options of nested
dataclasses only, so --help is printed here, with a title for each part of Config.
"""

import inspect
import os
import re
import sys
import textwrap
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path

import tyro
from tyro import _errors as parse_errors

from asyncrl import extras, user_code
from asyncrl.config import OPTIONS, AdvantageOptions, Config, allowed_values, flag, nearest
from asyncrl.engine.score import load_score
from asyncrl.tasks import prepare_task

_FIELD = re.compile(r'^    # (.+)$|^    (\w+): (?:.+\n)+?    """([^"]+)"""$', re.MULTILINE)


@dataclass(frozen=True)
class Command(Config):
    """The options of a run, and those of the command alone."""

    # This command
    advantage_options: typing.Annotated[AdvantageOptions, tyro.conf.arg(name="advantage")] = (
        Config.advantage_options
    )
    like: str | None = None
    """Take the options of another run, runs/NAME, as defaults."""
    dry_run: bool = False
    """Print placement, memory and a predicted step, and end."""
    gpus: str | None = None
    """GPUs to plan for, as 8xH100; unset takes those of this machine."""

    @property
    def config(self) -> Config:
        """The options of the run."""
        return Config(**{field.name: getattr(self, field.name) for field in fields(Config)})


def parse_config(args: list[str] | None = None) -> Config:
    """Read the command line (`args`, or sys.argv) into a checked Config.

    Exits with status 2 and one line that says what was given, what is allowed and what to change.
    """
    try:
        command = _read(args, None)
        config = command.config.checked()
        check(config)
        if command.gpus and not command.dry_run:
            raise ValueError(
                f"--gpus {command.gpus} is for --dry-run; a run has those of CUDA_VISIBLE_DEVICES"
            )
        if not command.dry_run:
            return config
        planning = extras.load("--dry-run")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(*planning.dry_run(config, command.gpus), sep="\n")
        raise SystemExit(0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_options(args: list[str] | None = None, default: Config | None = None) -> Config:
    """Read options on top of `default`, without a check of what they say together. Raises ValueError, in one line."""
    return _read(args, default).config


def _read(args: list[str] | None, default: Config | None) -> Command:
    """Read the arguments once for the defaults that they choose, and once more on top of these."""
    args = sys.argv[1:] if args is None else args
    wants_help = bool({"-h", "--help"} & set(args))
    args = [arg for arg in args if arg not in ("-h", "--help")]
    command = _parse(args, default or Config())
    if wants_help:
        print(_help_for(command, args))
        raise SystemExit(0)
    if command.resume:
        if command.like:
            raise ValueError(
                "--like does not go with --resume, which takes the run's options; leave one of them out"
            )
        from asyncrl.job.resume import check_changes, resumed_options

        begun = resumed_options(Path(command.resume))
        chosen = user_code.located(_parse(args, begun), Path(command.resume) / "code")
        return check_changes(_resolved(chosen, begun), begun)
    if command.like:
        default = options_like(Path(command.like))
    elif default is None and command.model != Config.model:
        max_response_tokens = 24 if command.task.startswith("sums") else 1024
        default = Config(max_prompt_tokens=512, max_response_tokens=max_response_tokens)
    return _resolved(command if default is None else _parse(args, default), default or Config())


def _parse(args: list[str], default: Config) -> Command:
    """Read arguments by tyro. Raises ValueError, in one line, for one that is none, or has a wrong value."""
    names = [arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("--")]
    for option in OPTIONS.values():
        if isinstance(option.default, tuple) and names.count(option.flag) > 1:
            raise ValueError(f"{option.flag} is given twice; put all its values behind one")
    of_three = {"--compile": ("--compile", "True"), "--no-compile": ("--compile", "False")}
    args = [word for arg in args for word in of_three.get(arg, (arg,))]
    with parse_errors.on_parse_error(_refuse):
        return tyro.cli(Command, args=args, default=Command(**vars(default)), add_help=False)


def _refuse(event: parse_errors.ParseErrorEvent) -> typing.NoReturn:
    """Raise ValueError with one line in place of the box that tyro would print."""
    if isinstance(event, parse_errors.UnrecognizedArgs):
        raise ValueError(_unknown(event.tokens[0]))
    name = event.argument.lowered.name_or_flags[-1]
    if isinstance(event, parse_errors.InvalidChoice):
        choices = ", ".join(event.choices)
        raise ValueError(
            f"{name} must be one of {choices}, got {event.value!r}{nearest(event.value, event.choices)}"
        )
    if isinstance(event, parse_errors.BadValue):
        raise ValueError(f"{name} expected one argument")
    reason = event.message.splitlines()[0]
    raise ValueError(f"{name} must be {allowed_values(event.argument.field.type)}: {reason}")


def _unknown(token: str) -> str:
    """Return what to say of an option that is none. It may be an option of a group, or an argument of a loss."""
    name = token.partition("=")[0].replace("_", "-")
    word = name.strip("-")
    known = [*(option.flag for option in OPTIONS.values()), "--like", "--dry-run", "--gpus"]
    hint = nearest(name, known)
    for option, text in ((OPTIONS[name], text) for _, name, text in option_texts() if name):
        if option.flag.endswith(f".{word}"):
            hint = f"; write {option.flag} VALUE"
        if f"`{word.replace('-', '_')}=" in text:
            hint = f"; write {option.flag} {word.replace('-', '_')}=VALUE"
    if group := re.fullmatch(r"--(optim|advantage|swarm)-args", name):
        hint = f"; its options are --{group[1]}.NAME VALUE each now, as --optim.warmup 5"
    return f"{name} is no option{hint}; --help lists all"


def check(config: Config) -> None:
    """Try the loss, the optimizer, the task and the rewards of a run.

    Raises ValueError, in one line, for an argument that one of them does not take, and for user code that is unfit.
    """
    from asyncrl.trainer.loss import choose_loss, try_loss
    from asyncrl.trainer.optimizer import try_optimizer

    loss = choose_loss(config)
    with user_code.blamed(config.algo, "--algo"):
        try_loss(loss)
    try_optimizer(config)
    prepare_task(config.task, config.seed, config.data_path, config.task_args)
    if not config.is_multi_turn:
        load_score(config.task, config.reward)
    if config.is_baseline:
        extras.load("--scheduling")
    user_code.files(user_code.texts_of(config))
    if config.listen is not None:
        extras.load("--listen")


def _resolved(command: Command, default: Config) -> Command:
    """Give all user code an absolute path, so that all processes mean one file.

    A class of gymnasium gets `environment:` before it. The default's task has it already. Raises ValueError, in one
    line, for a task that does not load.
    """
    command = user_code.located(command)
    task = command.task
    if task != default.task and user_code.is_own(task) and not task.startswith("environment:"):
        kind, gymnasium = user_code.load(task), sys.modules.get("gymnasium")
        if gymnasium and isinstance(kind, type) and issubclass(kind, gymnasium.Env):
            return replace(command, task=f"environment:{task}")
    return command


def options_like(run: Path) -> Config:
    """Return the options of a run, for another one. Raises ValueError, in one line, if no run of this code is there."""
    from asyncrl.job.resume import recorded

    return replace(Config.from_dict(recorded(run, "--like")["config"]), run_name=None, resume=None)


def _help_for(command: Command, args: list[str]) -> str:
    """Return the options of the loss if --algo is given, and else all options of a run."""
    if any(re.match("--algo(=|$)", arg) for arg in args):
        from asyncrl.trainer.loss import describe

        return describe(command.algo)
    lines = ["usage: train_async.py [options]", "", str(Config.__doc__)]
    for title, name, text in [*option_texts(), *_FIELD.findall(inspect.getsource(Command))]:
        if title:
            lines += ["", f"{title}:"]
            continue
        allowed = ""
        default = None
        if name in OPTIONS:
            default = OPTIONS[name].value_in(command)
            allowed = allowed_values(OPTIONS[name].kind)
        shown = (" ".join(default) or "none") if isinstance(default, tuple) else default
        text = f"{' '.join(text.split())} (default: {shown}{f'; {allowed}' if allowed else ''})"
        lines += [
            f"  --{flag(name)}",
            textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6),
        ]
    return "\n".join(lines)


def option_texts() -> list[tuple[str, str, str]]:
    """Return the title of a part, or the name and text of an option, in the order of asyncrl/config.py."""
    texts = []
    for title, name, text in _FIELD.findall(inspect.getsource(Config)):
        group = getattr(Config, name, None)
        if title or not hasattr(group, "__dataclass_fields__"):
            texts.append((title, name, text))
            continue
        prefix = name.partition("_")[0]
        texts.append((f"{text} (--{prefix}.NAME)", "", ""))
        of_group = _FIELD.findall(inspect.getsource(type(group)))
        texts += [
            ("", f"{prefix}.{inner}", text_of_option) for _, inner, text_of_option in of_group
        ]
    return texts
