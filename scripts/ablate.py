"""A grid of real runs, its tables and its figure.

    .venv/bin/python scripts/ablate.py --algos grpo grpo:clip_high=0.4 tis --async-ratio 0 --publish-delay 0 4 --seeds 3
    .venv/bin/python scripts/ablate.py --algos tis --sweep 'lr=0.001|3e-4' --sweep 'share_prefix=off|tree' -- --steps 40

Every combination is one cell: one `torchrun train_async.py`, all with the same number of steps. A finished cell is a
line of OUT/cells.jsonl and is not run again. The same --out continues where it stopped. Another command with this --out
adds its cells. Options behind `--` are given to every run, in the folder of the caller. grids.py describes the records.
It makes table.md, cells.csv and curves.png. It also makes paired.md and paired.png (stale less fresh data), and
against.md (each loss less the baseline). With --without it makes without.md. The option --dry-run checks the options of
every cell. It prints the cells, the questions of the tables, and the time. A signal ends the runs of unfinished cells.
Only a run that is not finite ends with a result. After any other error the same command runs the cell again.
"""

import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import tyro

from asyncrl import user_code
from asyncrl.cluster.fingerprint import user_code_digests
from asyncrl.cluster.processes import STOP_SIGNALS, ignore_signals, kill_with_sessions
from asyncrl.cluster.streams import keep_printing
from asyncrl.config import OPTIONS, Config, flag_of, nearest, with_home_folder, words_of
from asyncrl.job.choices import try_choices
from asyncrl.job.command_line import read_options_and_names
from asyncrl.runlog.header import git, uncommitted_changes
from scripts.grids import (
    MIN_SEEDS,
    MIN_VERSIONS,
    NOT_FINITE,
    QUESTIONS,
    code_version,
    is_result,
    key,
    loss,
    loss_names,
    num_level_versions,
    read_records,
    record_of,
    report,
    setting,
    warn_of_other_code,
)
from scripts.runs import load
from scripts.table import show

ROOT = Path(__file__).resolve().parent.parent
# -P, because runs are started in the user's folder, where a file can have the name of a module.
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
TRAIN = (*TORCHRUN, "--standalone", str(ROOT / "train_async.py"))
AXES = ("algo", "algo_args", "async_ratio", "publish_delay", "seed")
"""Options that every cell names first."""
SIMILAR_WORDS = {
    "--algo": "--algos LOSS1 LOSS2",
    "--seed": "--seeds N, which takes seeds 0 to N − 1",
    "--delay": "--publish-delay K1 K2",
    "--lag": "--publish-delay K1 K2",
    "--staleness": "--publish-delay K1 K2, or --async-ratio N1 N2 for at most N steps",
}
"""Words that are no options of this script, with the options that they mean."""
WRITING = threading.Lock()
"""Held while a record is written."""
POLL_S = 0.2
"""Time between two looks whether a run must end."""
GRACE_S = 10.0
"""Time that a stopped run has to remove its files. Its checkpoint is not needed: the cell starts again."""


@dataclass(frozen=True)
class Arguments:
    """The command line. Options behind `--` are those of every run."""

    algos: list[str] = field(default_factory=lambda: ["grpo", "tis", "topr"])
    """Losses, each with its options if it has any: ALGO[:NAME=VALUE ...]."""
    async_ratio: list[str] = field(default_factory=lambda: ["0", "4"])
    """Freshness bounds."""
    publish_delay: list[str] = field(default_factory=lambda: ["0"])
    """Steps that weights are late."""
    seeds: int = 3
    """Seeds 0 … N − 1."""
    sweep: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """OPTION=V1|V2: values of any option of train_async.py, a list's items apart by blanks. May be given again."""
    out: Path | None = None
    """Folder of records, tables and the figure; unset makes runs/ablation-DATE-TIME."""
    keep_runs: bool = False
    """Keep the directories of the runs, in OUT/runs."""
    parallel: int = 1
    """Runs at a time. They divide the cores, so times mean less."""
    dry_run: bool = False
    """Check and print the cells without a run."""
    report: bool = False
    """Make the tables and the figure of --out again without a run."""
    baseline: str | None = None
    """Loss that against.md compares other losses with, as the tables name it. Unset takes the first of --algos. With
    --report it takes grpo, or the first loss of the table."""
    without: tuple[str, ...] = ()
    """Options, as in `centering top_logprobs`: without.md compares each run that has them with the one without them."""
    extra: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Options of every run."""


def read_arguments(words: Sequence[str]) -> Arguments:
    """Read a command line. Raises ValueError for what is no option."""
    end = [*words, "--"].index("--")
    read = tyro.cli(Arguments, description=__doc__, args=words[:end], return_unknown_args=True)
    given, unknown = read
    if unknown:
        seeds = values_after("--seeds", words[:end])
        if len(seeds) > 1:
            what = f"--seeds {' '.join(seeds)}: --seeds takes a count"
            raise ValueError(f"{what}; write --seeds {len(seeds)}")
        meant = SIMILAR_WORDS.get(unknown[0].partition("=")[0])
        hint = f"write {meant}" if meant else "options of every run go after --"
        raise ValueError(f"{unknown[0]} is no option of this script; {hint}")
    without = tuple(name.replace("-", "_") for name in given.without)
    for name in without:
        if name not in OPTIONS:
            raise ValueError(f"--without {name} is no option of a run{nearest(name, OPTIONS)}")
    return replace(given, extra=tuple(words[end + 1 :]), without=without)


def values_after(name: str, words: Sequence[str]) -> list[str]:
    """Return the words between an option and the next one."""
    after = itertools.dropwhile(lambda word: word != name, words)
    return list(itertools.takewhile(lambda word: not word.startswith("-"), [*after][1:]))


# Cells


def cell_name(cell: dict, loss_name: str | None = None) -> str:
    """Return the name of a cell's run; unset, the name of the loss is that of --algos."""
    letters = {"async_ratio": "a", "publish_delay": "k"}
    parts = [loss_name or loss(cell)]
    for name, value in setting(cell).items():
        parts.append(letters.get(name, f"{name}=") + show(value))
    if "seed" in cell:
        parts.insert(3, f"s{cell['seed']}")
    return re.sub(r"[^\w.+=-]", "+", "-".join(parts))


def run_names(cells: Sequence[dict], records: Sequence[dict]) -> dict[str, str]:
    """Return the names of the runs of cells by their keys. No other cell or record has them: a run has a folder."""
    all_cells = [*cells, *(record["cell"] for record in records)]
    losses = loss_names(all_cells)
    return {key(cell): cell_name(cell, losses[key(cell)]) for cell in cells}


@functools.cache
def common_options(extra: tuple[str, ...]) -> tuple[Config, frozenset[str]]:
    """Return the options that every run is given, and the names of those in the words. Old names are warned of once."""
    return read_options_and_names([*extra])


def read_cell(texts: dict[str, str | list[str]], extra: tuple[str, ...]) -> dict:
    """Return a cell with the values that texts mean to a run with the options `extra`.

    Raises ValueError if such a run would not accept it, or if `extra` has an option of the cell.
    """
    common, given_names = common_options(extra)
    config = user_code.with_absolute_paths(common.changed(texts))
    values = {name: OPTIONS[name].value_in(config) for name in texts}
    cell = {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}
    try:
        for name in values:
            if name in given_names:
                raise ValueError(f"{flag_of(name)} is the grid's; give it before --")
        try_choices(config.checked())
    except ValueError as error:
        raise ValueError(f"cell {cell_name(cell)}: {error}") from None
    return cell


def read_loss(text: str) -> dict[str, str | list[str]]:
    """Return the texts of a loss and of its options. A colon separates the two.

    Raises ValueError for several losses in one text.
    """
    if "," in text.partition(":")[0]:
        what = f"--algos {text}: values are separated by blanks"
        raise ValueError(f"{what}; write --algos {text.replace(',', ' ')}")
    algo, arguments = re.fullmatch(r"(.*?)(?::(\w+=.*))?", text).groups()
    return {"algo": algo} | ({"algo_args": arguments.split()} if arguments else {})


def read_axes(arguments: Arguments) -> dict[str, list[str | list[str]]]:
    """Return the texts of the values of each option that varies beside loss and seed."""
    axes = {"publish_delay": arguments.publish_delay, "async_ratio": arguments.async_ratio}
    for name, values in axes.items():
        for value in values:
            if "," in value:
                what = f"{flag_of(name)} {value}: values are separated by blanks"
                raise ValueError(f"{what}; write {flag_of(name)} {value.replace(',', ' ')}")
    for sweep in arguments.sweep:
        name, separator, text = sweep.partition("=")
        name = name.replace("-", "_")
        if not separator:
            raise ValueError(f"--sweep takes OPTION=V1|V2, as in lr=0.001|0.0003, got {sweep!r}")
        if name not in OPTIONS:
            raise ValueError(f"{flag_of(name)} is no option{nearest(name, OPTIONS)}")
        if name in ("algo", "seed", *axes):
            own = "--algos, --async-ratio, --publish-delay and --seeds are options of this script"
            what = f"has values already; sweep an option once, and {own}"
            raise ValueError(f"--sweep {flag_of(name)[2:]} {what}")
        values = text.split("|")
        axes[name] = [value.split() for value in values] if OPTIONS[name].is_list else values
    return axes


def cells_of(arguments: Arguments) -> list[dict]:
    """Return the cells that the command line asks for. Raises ValueError if a run would not accept one.

    Seeds are outermost: a grid stopped early has whole seeds, and a busy hour falls on all alike.
    """
    losses = [read_loss(text) for text in arguments.algos]
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    axes = read_axes(arguments)
    cells: dict[str, dict] = {}
    for *values, texts in itertools.product(*axes.values(), losses):
        twice = "algo_args" in texts and "algo_args" in axes
        texts = texts | dict(zip(axes, values, strict=True)) | {"seed": "0"}
        ordered = {name: texts[name] for name in [*AXES, *sorted(texts)] if name in texts}
        cell = read_cell(ordered, arguments.extra)
        if twice or key(cell) in cells:
            what = "or an option of it, is there twice; name each value and option once"
            raise ValueError(f"{cell_name(cell)}, {what}")
        cells[key(cell)] = cell
    return [cell | {"seed": seed} for seed in range(arguments.seeds) for cell in cells.values()]


def warn_of_few_versions(cells: list[dict], extra: tuple[str, ...]) -> None:
    """Print how many steps level needs, if the cells with the options `extra` have fewer."""
    lag = max(cell["publish_delay"] + math.ceil(cell["async_ratio"]) for cell in cells)
    common, _ = common_options(extra)
    num_steps = min(cell.get("steps", common.steps) for cell in cells)
    num_versions = max(0, num_level_versions(num_steps, lag))
    if num_versions < MIN_VERSIONS:
        final = ". Final accuracy needs no more steps" if common.eval_every else ""
        print(
            f"warning: {num_steps} steps with a lag of {lag} can leave {num_versions} versions for level, which needs "
            f"{MIN_VERSIONS}; give -- --steps {2 * (lag + MIN_VERSIONS) - 1}{final}",
            file=sys.stderr,
        )


def warn_of_few_seeds(num_seeds: int) -> None:
    """Print how many seeds an interval needs, if there are fewer."""
    if num_seeds < MIN_SEEDS:
        print(
            f"warning: --seeds {num_seeds} gives means only; an interval and a verdict need --seeds {MIN_SEEDS}",
            file=sys.stderr,
        )


def describe(
    cells: list[dict], records: list[dict], baseline: str | None, extra: tuple[str, ...]
) -> list[str]:
    """Return the names of the cells, and the question that each table answers or what it needs.

    The records are those of the grid so far.
    """
    losses = loss_names([*cells, *(record["cell"] for record in records)])
    names = run_names(cells, records)
    is_fresh = {cell["async_ratio"] == cell["publish_delay"] == 0 for cell in cells}
    needed = {
        "paired.md": len(is_fresh) < 2
        and "fresh and stale cells, as of --async-ratio 0 --publish-delay 0 16",
        "against.md": len({losses[key(cell)] for cell in cells}) < 2
        and "two losses, as --algos grpo tis",
    }
    options = f", each with {shlex.join(extra)}" if extra else ""
    lines = [f"{len(cells)} runs{options}:", *(f"  {names[key(cell)]}" for cell in cells)]
    for name, what in needed.items():
        question = QUESTIONS[name].format(baseline=baseline or losses[key(cells[0])])
        lines.append(f"{name}: {question}" + (f" Not made: it needs {what}." if what else ""))
    return lines


def unfinished(cells: list[dict], records: list[dict]) -> list[dict]:
    """Return the cells without a record that is a result."""
    finished = {key(record["cell"]) for record in records if is_result(record)}
    return [cell for cell in cells if key(cell) not in finished]


def time_needed(cells: list[dict], records: list[dict], parallel: int) -> str:
    """Return in words how long the unfinished cells take, by the mean of the finished ones."""
    num_missing = len(unfinished(cells, records))
    if not num_missing:
        return "time: all runs are finished"
    seconds = [record["seconds"] for record in records if "seconds" in record]
    if not seconds:
        return (
            "time: not known yet; a default run takes one to three minutes on two cores. After the first run, the same "
            "command with this --out predicts it"
        )
    minutes = math.ceil(num_missing / parallel) * sum(seconds) / len(seconds) / 60
    what = f"{num_missing} unfinished run{'s' * (num_missing > 1)}"
    return f"time: about {max(1, round(minutes))} min for {what}"


# Runs


def run_to_end(words: Sequence[str], stop: threading.Event) -> tuple[int, str]:
    """Run a command, and return its exit status and its standard error. `stop` ends all processes of the command.

    It runs in the caller's folder, so relative paths mean the files that were checked.
    The command has its own session, so it gets no Ctrl-C of a terminal. Two signals would disturb the end of torchrun.
    """
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while True:
        try:
            _, text = process.communicate(timeout=POLL_S)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            if stop.is_set():
                kill_with_sessions(process, GRACE_S)


def code_of(cell: dict, extra: tuple[str, ...]) -> dict[str, str]:
    """Return a digest of each file of user code that a cell's run reads, by its path."""
    common, _ = common_options(extra)
    return user_code_digests(common.changed(cell))


def run_cell(cell: dict, name: str, arguments: Arguments, stop: threading.Event) -> dict:
    """Run one cell to its end, and return its record.

    A loss or gradient that is not finite is a result. Raises ValueError for any other error, or if it made no step.
    """
    start = time.monotonic()
    words = [*words_of(cell), *arguments.extra]
    record = {"cell": cell, "options": words, "user_code": code_of(cell, arguments.extra)}
    with tempfile.TemporaryDirectory(prefix="ablate-") as folder:
        runs = arguments.out / "runs" if arguments.keep_runs else Path(folder)
        runs.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(runs / name, ignore_errors=True)  # of a grid that was interrupted
        place = f"--runs-dir={runs.resolve()}", f"--run-name={name}"
        status, text = run_to_end([*TRAIN, *words, *place], stop)
        record["seconds"] = round(time.monotonic() - start, 1)
        if status:
            lines = [line for line in text.splitlines() if line.startswith("error: ")]
            results = [line for line in lines if NOT_FINITE.search(line)]
            if not results:  # killed for memory, or the disk is full, say
                reason = lines[0].removeprefix("error: ") if lines else text[-500:].strip()
                how = f"the same command with --out {arguments.out} runs it again"
                what = f"cell {name} was killed or broke, which is no result; {how}"
                raise ValueError(f"{what}: {reason}")
            record["error"] = results[0]
        try:
            return record | record_of(load(runs / name))
        except ValueError as error:
            raise ValueError(f"cell {name} has no metrics: {record.get('error', error)}") from None


def check_options(cells: list[dict], records: list[dict], extra: tuple[str, ...]) -> None:
    """Raise ValueError if a finished cell had other options than these, or other user code."""
    finished = {key(record["cell"]): record for record in records if is_result(record)}
    for cell in cells:
        record = finished.get(key(cell))
        if record is None:
            continue
        # The record can have another order of --sweep. The runs are the same.
        before, now = record["options"], [*words_of(record["cell"]), *extra]
        if before != now:
            changed = f"{shlex.join(before)}, not {shlex.join(now)}"
            raise ValueError(f"{cell_name(cell)} ran with {changed}; give another --out")
        if "user_code" in record:  # records of older code lack it
            check_code(cell, record["user_code"], extra)


def check_code(cell: dict, code_before: dict[str, str], extra: tuple[str, ...]) -> None:
    """Raise ValueError, naming the files, if a cell's user code has other digests than before."""
    code = code_of(cell, extra)
    files = [path for path in code if code_before.get(path) != code[path]]
    if files:
        raise ValueError(
            f"{cell_name(cell)} is of other code in {', '.join(files)} than is there now; give another --out, or "
            "restore the code"
        )


def keep_and_report(record: dict, name: str, cells: list[dict], arguments: Arguments) -> None:
    """Append a cell's record, and print its result and the time that the other cells need."""
    path = arguments.out / "cells.jsonl"
    with WRITING:
        keep(record, name, path)
        print(" ", time_needed(cells, read_records(path), arguments.parallel), flush=True)


def run_missing(cells: list[dict], arguments: Arguments) -> None:
    """Run the unfinished cells, and append each record as it comes.

    After an error no other cell is started. It is raised when all running cells have ended and are kept. A signal
    ends the runs, and their cells are not kept. Then KeyboardInterrupt is raised.
    """
    path = arguments.out / "cells.jsonl"
    records = read_records(path)
    check_options(cells, records, arguments.extra)
    missing, names = unfinished(cells, records), run_names(cells, records)
    codes = {key(cell): code_of(cell, arguments.extra) for cell in missing}
    if missing:
        now = code_version(git("rev-parse", "HEAD"), uncommitted_changes())
        warn_of_other_code([now, *(record["code"] for record in records)])
    num_finished = len(cells) - len(missing)
    numbers = {key(cell): number for number, cell in enumerate(missing, num_finished + 1)}
    print(f"{len(cells)} cells, {num_finished} of them finished before; {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    failures: list[BaseException] = []
    stop = threading.Event()

    def attempt(cell: dict) -> None:
        if failures:
            return
        print(names[key(cell)], f"starts, {numbers[key(cell)]} of {len(cells)}", flush=True)
        try:
            check_code(cell, codes[key(cell)], arguments.extra)  # an edit while the grid runs
            record = run_cell(cell, names[key(cell)], arguments, stop)
            if not stop.is_set():  # the signal may have ended it
                keep_and_report(record, names[key(cell)], cells, arguments)
        except Exception as error:  # any error of a run must leave the records of other runs
            failures.append(error)

    shares = divide_cores(arguments.parallel)
    with ThreadPoolExecutor(
        arguments.parallel, initializer=lambda: os.sched_setaffinity(0, shares.pop())
    ) as pool:
        try:
            wait([pool.submit(attempt, cell) for cell in missing])
        except KeyboardInterrupt as interrupt:
            failures.insert(0, interrupt)
            stop.set()
    if failures:
        raise failures[0]


def divide_cores(num_shares: int) -> list[set[int]]:
    """Return the cores of each share, as equal as can be. With fewer cores than shares each has all cores.

    A run binds its trainer and its engines to cores. Two runs that see the same cores bind to the same ones.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_shares:
        return [set(cores)] * num_shares
    return [set(cores[share::num_shares]) for share in range(num_shares)]


def keep(record: dict, name: str, path: Path) -> None:
    """Append a record of the run with this name to a file, and print its result."""
    with open(path, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")
    reward = record["summary"]["reward_last"]
    results = [] if reward is None else [f"reward {reward:.3f} in the last tenth of the steps"]
    if record["evaluations"]:
        accuracies = [f"{accuracy:.3f} at {version}" for version, accuracy in record["evaluations"]]
        results.append(f"held-out accuracy by version: {', '.join(accuracies)}")
    result = record.get("error", "; ".join(results))
    print(f"{name}: {result}", flush=True)


def run_grid(arguments: Arguments, cells: list[dict]) -> None:
    """Run what is missing of a grid, and report. Raises ValueError as `run_missing` and `report` do.

    A signal ends it in a line that says how many cells are finished.
    """
    out, baseline = arguments.out, arguments.baseline
    if not arguments.report:
        try:
            run_missing(cells, arguments)
        except KeyboardInterrupt:
            num_finished = len(cells) - len(unfinished(cells, read_records(out / "cells.jsonl")))
            how = f"the same command with --out {shlex.quote(str(out))} continues"
            sys.exit(f"stopped: {num_finished} of {len(cells)} cells are finished; {how}")
        losses = loss_names([record["cell"] for record in read_records(out / "cells.jsonl")])
        baseline = baseline or losses[key(cells[0])]
    report(out, baseline, arguments.without)


def interrupt(number: int, frame) -> NoReturn:
    """Stop the script by a signal, once: `timeout` sends its signal twice."""
    ignore_signals()
    raise KeyboardInterrupt


def main() -> None:
    """Read the command line, run what is missing, report."""
    keep_printing()
    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)
    try:
        arguments = read_arguments(with_home_folder(sys.argv[1:]))
        if arguments.report and not arguments.out:
            raise ValueError("--report needs --out, the directory of a grid")
        out = arguments.out or Path("runs") / time.strftime("ablation-%Y%m%d-%H%M%S")
        arguments = replace(arguments, out=out)
        cells = [] if arguments.report else cells_of(arguments)
        if cells:
            warn_of_few_versions(cells, arguments.extra)
            warn_of_few_seeds(arguments.seeds)
        if cells and arguments.dry_run:
            records = read_records(out / "cells.jsonl")
            print(*describe(cells, records, arguments.baseline, arguments.extra), sep="\n")
            print(time_needed(cells, records, arguments.parallel))
        else:
            run_grid(arguments, cells)
    except KeyboardInterrupt:
        sys.exit("stopped")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
