"""The command line of a run, read by tyro from the options that Config declares.

User code (FILE.py:NAME) is found here, and `try_choices` tries it before slow parts start. This module prints --help,
too, with a title for each section of Config.
"""

import itertools
import json
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypedDict

import tyro
from tyro import _errors as parse_errors

from asyncrl import extras, user_code
from asyncrl.config import (
    OPTIONS,
    RENAMED,
    SPLIT,
    Config,
    Option,
    allowed_values,
    flag_of,
    nearest,
    options_of,
    switch,
    with_home_folder,
    with_new_names,
)
from asyncrl.job.choices import try_choices


@dataclass(frozen=True)
class Command:
    """Options of the command, not of the run."""

    like: Annotated[str | None, "This command"] = None
    """Another run, runs/NAME, whose options are the defaults."""
    config: str | None = None
    """TOML file with options of the run, or a run.json. The command line overrides them."""
    print_config: bool = False
    """Print the options that the run would have, as TOML for --config, and end."""
    dry_run: bool = False
    """Check the inputs of a run, print placement, memory and a predicted step, and end."""
    gpus: str | None = None
    """GPUs to plan for, for example 8xH100. Unset takes the GPUs of this machine."""


WORDS_OF_OTHER_PROJECTS = {
    "--async-ratio N for at most N steps, or --async-ratio 0 --publish-delay N for exactly N": (
        "staleness lag off-policy-steps"
    ),
    "--async-ratio N, which is that bound in steps": (
        "max-staleness staleness-bound max-off-policy-steps max-head-offpolicyness"
    ),
    "--async-ratio N, the batches that rollout may be ahead": (
        "max-async-level async-queue-size staleness-threshold alpha"
    ),
    "--groups-per-step PROMPTS and --group-size RESPONSES of each": (
        "batch-size train-batch-size global-batch-size per-device-train-batch-size "
        "rollout-batch-size generation-batch-size"
    ),
    "--group-size N": "num-generations n-samples-per-prompt rollout.n rollouts-per-example",
    "--minibatches N, the updates of a step": (
        "mini-batch-size ppo-mini-batch-size num-steps-per-rollout"
    ),
    "--max-tokens-per-microbatch N for memory, or --minibatches N for more updates a step": (
        "gradient-accumulation-steps micro-batch-size micro-train-batch-size "
        "ppo-micro-batch-size-per-gpu steps-per-generation"
    ),
    "--max-tokens-per-microbatch N": "max-tokens-per-gpu ppo-max-token-len-per-gpu",
    "--optim.epochs N": "num-iterations ppo-epochs max-epochs",
    "--steps N": "max-steps total-training-steps num-rollout",
    "--steps N, each of --groups-per-step prompts": "num-train-epochs total-epochs num-episodes",
    "--max-prompt-tokens N": "max-prompt-length prompt-max-len rollout-max-prompt-len",
    "--max-response-tokens N": (
        "max-new-tokens max-completion-length max-response-length generate-max-len "
        "rollout-max-response-len max-tokens"
    ),
    "--lr VALUE": "learning-rate actor-learning-rate optim.lr",
    "--kl-coef VALUE": "beta kl kl-beta kl-loss-coef init-kl-coef use-kl-loss",
    "--algo-args clip_low=VALUE clip_high=VALUE": "epsilon eps-clip clip-eps clip-ratio cliprange",
    "--algo-args clip_low=VALUE": "clip-low clip-ratio-low",
    "--algo-args clip_high=VALUE": "epsilon-high eps-clip-high clip-ratio-high",
    "--algo NAME": "loss loss-type loss-mode policy-loss",
    "--algo grpo, or decoupled_ppo with a proximal policy": "ppo",
    "--algo gspo": "importance-sampling-level",
    "--algo tis_ppo": "use-tis vllm-importance-sampling-correction enable-vllm-is-correction",
    "--algo tis_ppo --algo-args cap=VALUE": (
        "vllm-importance-sampling-cap rollout-is-threshold tis-imp-ratio-cap"
    ),
    "--loss-aggregation NAME": "loss-agg-mode",
    "--advantage NAME": "advantage-estimator adv-estimator",
    "--advantage dr_grpo for rewards that are not divided by their deviation": (
        "scale-rewards norm-adv-by-std-in-grpo disable-grpo-std-normalization"
    ),
    "--advantage.overlong-tokens N": "overlong-buffer.len soft-overlong-punishment",
    "--optim.entropy-coef VALUE": "entropy-coeff",
    "--max-grad-norm VALUE": "grad-clip clip-grad",
    "--drop-zero-variance": "dynamic-sampling dynamic-filtering filter-groups.enable",
    "--on-update resume": "partial-rollout",
    "--model NAME": "model-name model-name-or-path pretrain hf-checkpoint model.path model.name",
    "--task NAME, and --data-path FILE for rows of your own": (
        "dataset dataset-name prompt-data train-files"
    ),
    "--reward FILE.py:FUNCTION": "reward-funcs rm-type custom-reward-function.path",
    "--rollout-tp N": (
        "tp tensor-parallel-size tensor-model-parallel-size vllm-tensor-parallel-size "
        "rollout-num-gpus-per-engine"
    ),
    "--max-prompt-tokens N and --max-response-tokens N": (
        "seq-len max-seq-len max-length max-model-len vllm-max-model-length"
    ),
    "--num-rollout-workers N": "vllm-num-engines rollout-num-engines",
    "torchrun --nnodes N": "nnodes actor-num-nodes num-nodes",
    "torchrun --nproc-per-node N, the GPUs that train": (
        "n-gpus-per-node actor-num-gpus-per-node num-gpus"
    ),
    "--gpu-memory-utilization VALUE": "vllm-gpu-memory-utilization sglang-mem-fraction-static",
    "nothing, because vLLM always samples": "vllm use-vllm",
    "--save-memory activations": "gradient-checkpointing",
    "--dtype bfloat16": "bf16",
    "--eval-every N": "eval-steps eval-interval test-freq",
    "--save-every N": "save-steps save-interval save-freq",
    "--resume runs/NAME": "resume-from-checkpoint",
    "--runs-dir FOLDER": "output-dir save-path default-local-dir",
    "--run-name NAME": "experiment-name exp-name",
    "--tracker NAME": "report-to logger",
    "--tracker wandb": "wandb use-wandb",
    "--tracker-project NAME": "project-name",
}
"""Words of this command line, with the options of TRL, verl, slime, prime-rl, OpenRLHF and AReaL that mean them."""
OPTIONS_OF_OTHER_PROJECTS = {
    option: words
    for words, options in WORDS_OF_OTHER_PROJECTS.items()
    for option in options.split()
}
"""Options of other projects, with the words for them here. They can follow the names of sections and a dot."""
ALL_OPTIONS = OPTIONS | {option.name: option for option in options_of(Command)}
MAY_BE_UNSET = [
    option for option in ALL_OPTIONS.values() if option.is_switch and option.default is None
]
"""Switches that are also neither on nor off."""
HELP_HINT = " (--help lists all)"
"""The end of an error about unknown options."""
NEW_WORDS = {
    switch(old, is_on): switch(new, is_on)
    for old, new in RENAMED.items()
    for is_on in (True, False)
}
"""Words of the last release, with the words of today."""


def _text_type(option: Option) -> Any:
    """Return the type that tyro reads of an option: a switch, or texts. msgspec converts texts once all are known."""
    kind: Any = str
    if option.is_switch and option.default is not None:
        kind = bool
    elif option.is_list:
        kind = list[str]
    return Annotated[kind, tyro.conf.arg(name=option.flag.removeprefix("--"))]


def parse_config(args: list[str] | None = None) -> Config:
    """Read the command line (`args`, or sys.argv) into a checked Config.

    Exits with status 2 for a mistake. One line shows the given words, the allowed values, and the change to make.
    """
    try:
        given = _read_words(args)
        gpus = given.get("gpus")
        config = _with_defaults(given, None).checked()
        try_choices(config)
        if gpus and not given.get("dry_run"):
            raise ValueError(
                f"--gpus {gpus} is for --dry-run; a run has those of CUDA_VISIBLE_DEVICES"
            )
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if given.get("print_config"):
            lines = [as_toml(config)]
        elif given.get("dry_run"):
            planning = extras.load("--dry-run")
            lines = planning.dry_run(config, gpus) if is_first else []
        else:
            return config
        if is_first:
            print(*lines, sep="\n")
        raise SystemExit(0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_options(args: list[str] | None = None, default: Config | None = None) -> Config:
    """Read options on top of `default`, without a check of combinations. Raises ValueError, in one line."""
    return _with_defaults(_read_words(args), default)


def read_options_and_names(args: list[str]) -> tuple[Config, frozenset[str]]:
    """Read options as `read_options` does. Return also the names of the options that the words give, as of today."""
    given = _read_words(args)
    return _with_defaults(given, None), frozenset(given)


def _read_words(args: list[str] | None) -> dict[str, Any]:
    """Return the texts of a command line, by the names of options. With --help print the help, and exit.

    A switch is a truth and not a text. Raises ValueError, in one line, for a word that is no option.
    """
    args = with_home_folder(sys.argv[1:] if args is None else args)
    words = [_todays_word(word) for word in args if word not in ("-h", "--help")]
    names = [word.partition("=")[0].replace("_", "-") for word in words]
    for option in ALL_OPTIONS.values():
        if option.is_list and names.count(option.flag) > 1:
            raise ValueError(f"{option.flag} is given twice; put all its values behind one")
    # Only given options have a key: defaults that depend on other options are chosen later.
    # tyro is slow to describe all options.
    kinds = {old: str for old in SPLIT if flag_of(old) in names} | {
        name: _text_type(option)
        for name, option in ALL_OPTIONS.items()
        if option.flag in names or switch(name, False) in names
    }
    with parse_errors.on_parse_error(_refuse):
        texts = tyro.cli(TypedDict("GIVEN", kinds, total=False), args=words, add_help=False)
    given = {name: None if text == "None" else text for name, text in texts.items()}
    if len(words) < len(args):
        print(_help_for(given.get("algo")))
        raise SystemExit(0)
    for old in SPLIT.keys() & given.keys():
        new_options = with_new_names({old: given[old]}).items()
        new_words = " ".join(f"{OPTIONS[name].flag} {value}" for name, value in new_options)
        print(f"warning: {flag_of(old)} {given[old]} is {new_words} now", file=sys.stderr)
    return with_new_names(given)


def _todays_word(word: str) -> str:
    """Return a word of the command line for tyro: a name of the last release becomes the name of today. A switch that
    can be unset, for example `--compile`, gets its value as text."""
    name, sign, value = word.partition("=")
    new = NEW_WORDS.get(name.replace("_", "-"))
    if new is not None:
        print(f"warning: {name} is {new} now", file=sys.stderr)
        return f"{new}{sign}{value}"
    for option in MAY_BE_UNSET:
        for is_on in (True, False):
            if word == switch(option.name, is_on):
                return f"{option.flag}={is_on}"
    return word


def _refuse(event: parse_errors.ParseErrorEvent) -> NoReturn:
    """Raise ValueError with one line in place of the box that tyro would print."""
    if isinstance(event, parse_errors.UnrecognizedArgs):
        # Other tokens are values of unknown options. Those of verl have no dashes, and a dot.
        options = [token for token in event.tokens if re.match(r"--|\w+\..*=", token)]
        if not options:
            raise ValueError(
                f"{event.tokens[0]} is no option, nor a second value of the option before it{HELP_HINT}"
            )
        lines = map(_unknown_option_error, options)
        raise ValueError(". ".join(lines).replace("?.", "?") + HELP_HINT)
    name = event.argument.lowered.name_or_flags[-1]
    if name.removeprefix("--") in SPLIT:
        raise ValueError(_unknown_option_error(name) + HELP_HINT)
    raise ValueError(f"{name} expected one argument")


def _help_for(algo: str | None) -> str:
    """Return the options of a loss, or all options of a run under the titles of their sections."""
    if algo is not None:
        from asyncrl.trainer.loss_choice import describe

        return describe(algo)
    lines = ["usage: train_async.py [options]", "", str(Config.__doc__)]
    indent = " " * 6
    for section, options in itertools.groupby(ALL_OPTIONS.values(), lambda option: option.section):
        lines += ["", f"{section}:"]
        for option in options:
            notes = f"{option.shown_default}; {allowed_values(option.kind)}"
            meaning = f"{option.text} (default: {notes})"
            wrapped = textwrap.fill(meaning, 100, initial_indent=indent, subsequent_indent=indent)
            lines += [f"  {option.flag}", wrapped]
    return "\n".join(lines)


def _with_defaults(given: dict[str, Any], default: Config | None) -> Config:
    """Return the options of a run: the given ones on top of `default`, or of the defaults that they choose."""
    if given.get("config"):
        given = _read_config_file(given["config"]) | given
    values = {name: value for name, value in given.items() if name in OPTIONS}
    if given.get("resume"):
        if "like" in given:
            raise ValueError(
                "--like does not go with --resume, which takes the run's options; leave one of them out"
            )
        from asyncrl.job.resume import keep_fixed_options, read_resumed_options

        run = Path(given["resume"])
        last_options = read_resumed_options(run)
        config = _with_located_code(last_options.changed(values), run / "code")
        return keep_fixed_options(config, last_options)
    if given.get("like"):
        from asyncrl.job.resume import read_checked_header

        like = Config.from_dict(read_checked_header(Path(given["like"]), "--like")["config"])
        default = replace(like, run_name=None, resume=None)
    elif default is None and given.get("model", Config.model) != Config.model:
        is_sums = given.get("task", "").startswith("sums")
        default = Config(max_prompt_tokens=512, max_response_tokens=24 if is_sums else 1024)
    return _with_located_code((default or Config()).changed(values))


def _read_config_file(path: str) -> dict[str, Any]:
    """Return the options of a TOML file or a run.json by name, with values as on a command line.

    Raises ValueError for an unknown key and for a value that is not allowed. The error names file and key in one line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text)["config"] if path.endswith(".json") else tomllib.loads(text)
        if path.endswith(".json"):
            content = content | {"run_name": None}  # the old run has the name
        keys = [*_keys_of(content)]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--config {path}: {error}; give a TOML file with options, or a run.json"
        ) from None
    options = {}
    for key, value in keys:
        try:
            for name, new_value in with_new_names({key.replace("-", "_"): value}).items():
                if name in ALL_OPTIONS.keys() - OPTIONS.keys():
                    raise ValueError(f"{flag_of(name)} belongs on the command line")
                if name not in OPTIONS:
                    raise ValueError(_unknown_option_error(flag_of(name)) + HELP_HINT)
                options[name] = _value_as_given(OPTIONS[name], new_value)
                Config.from_dict({name: options[name]})
        except ValueError as error:
            raise ValueError(f"--config {path}: {key}: {error}") from None
    return options


def _keys_of(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a table. A key of a nested table follows the table's name and a dot."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _keys_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value_as_given(option: Option, value: Any) -> Any:
    """Return a value of a file as the command line would give it: "None" unsets, and `~` is the home folder."""
    if isinstance(value, str):
        (value,) = with_home_folder([value])
        if value == "None":
            return None
        return [value] if option.is_list else value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return with_home_folder(value)
    return value


def as_toml(config: Config) -> str:
    """Return the options of a run as TOML for --config. It leaves out the options without a value."""
    tables: dict[str, list[str]] = {}
    for name, option in OPTIONS.items():
        value = option.value_in(config)
        if value is None and option.default is None:
            continue
        table, _, key = name.rpartition(".")
        if table in OPTIONS:  # A table of TOML cannot have the name of a key, here `advantage`.
            table, key = "", json.dumps(name)
        shown = json.dumps("None" if value is None else value, ensure_ascii=False)
        # JSON is TOML, but for one character that TOML escapes.
        line = f"{key} = {shown}".replace("\x7f", r"\u007f")
        tables.setdefault(f"\n[{table}]" if table else "", []).append(line)
    return "\n".join(line for table, lines in tables.items() for line in (table, *lines)).strip()


def _with_located_code(config: Config, folder: Path | None = None) -> Config:
    """Return the options with absolute paths of user code, so that all processes mean one file.

    A class of gymnasium becomes environment:FILE.py:NAME. So processes know the kind of the task without an import.
    Raises ValueError, in one line, for a task that does not load.
    """
    config = user_code.with_absolute_paths(config, folder)
    if not user_code.is_user_code(config.task) or config.is_multi_turn:
        return config
    kind, gymnasium = user_code.load(config.task), sys.modules.get("gymnasium")
    if gymnasium and isinstance(kind, type) and issubclass(kind, gymnasium.Env):
        return replace(config, task=f"environment:{config.task}")
    return config


def _unknown_option_error(token: str) -> str:
    """Return the error for an unknown option. It can be meant for an option of a group, or an argument of a loss."""
    name = token.partition("=")[0].replace("_", "-")
    word = name.strip("-")
    hint = nearest(name, (option.flag for option in ALL_OPTIONS.values()))
    old_names = {new: old for old, new in RENAMED.items()}
    for option in OPTIONS.values():
        if option.flag.endswith(f".{word}") or old_names.get(option.name, "").endswith(f".{word}"):
            hint = f"; write {option.flag} VALUE"
        if f"`{word.replace('-', '_')}=" in option.text:
            hint = f"; write {option.flag} {word.replace('-', '_')}=VALUE"
    is_own_section = any(
        option.flag.startswith(f"--{word.partition('.')[0]}.") for option in OPTIONS.values()
    )
    section, _, last_word = word.rpartition(".")
    is_known = any(option.flag == f"--{last_word}" for option in OPTIONS.values())
    if section and is_known and not is_own_section:
        hint = f"; write --{last_word} VALUE"
    for other_option, words in OPTIONS_OF_OTHER_PROJECTS.items():
        in_section = word.endswith(f".{other_option}") and not is_own_section
        if word == other_option or in_section:
            hint = f"; write {words}"
    return f"{name} is no option{hint}"
