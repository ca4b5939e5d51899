"""A grid of real runs, its tables and its figure.

    python scripts/ablate.py --algos grpo grpo:clip_high=0.4 tis --async-ratio 0 --publish-delay 0 4 --seeds 3
    python scripts/ablate.py --algos grpo --sweep 'lr=0.001|0.0003' --sweep 'share_prefix=off|tree' -- --steps 40
    python scripts/ablate.py --replay runs/A runs/B --algos tis topr    # on the batches of runs made with --record
    python scripts/ablate.py --study lag --parallel 2                   # a part of docs/staleness.md, or all of it

Every combination is one cell: one `torchrun train_async.py`, all with the same number of steps. A finished cell is a
line of OUT/cells.jsonl and is not run again: the same --out continues where it stopped. What follows `--` is given to
every run. A part of --study is what study.toml says, in OUT/PART. grids.py says what is kept, and makes table.md,
paired.md, cells.csv and curves.png of it.
"""

import argparse
import itertools
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncrl import user_code
from asyncrl.config import OPTIONS, Config, flag, nearest, switch
from asyncrl.job.command_line import check, read_options
from scripts.grids import RECORDED, key, loss, read_records, record_of, report, setting
from scripts.runs import load
from scripts.table import show

ROOT = Path(__file__).resolve().parent.parent
TRAIN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "train_async.py")
REPLAY = (sys.executable, "scripts/replay.py")
STUDY = tomllib.loads((ROOT / "scripts" / "study.toml").read_text(encoding="utf-8"))
AXES = ("algo", "algo_args", "async_ratio", "publish_delay", "seed")
"""Options that every cell names first."""


# Cells


def read_value(name: str, text: str) -> dict:
    """One value of an option; that of `algo` may have the loss's options behind a colon. Raises ValueError."""
    algo, arguments = re.fullmatch(r"(.*?)(?::(\w+=.*))?", text).groups()
    if name == "algo" and arguments:
        return read_value("algo", algo) | read_value("algo_args", arguments)
    if name not in OPTIONS:
        raise ValueError(f"--{flag(name)} is no option{nearest(name, OPTIONS)}")
    option = OPTIONS[name]
    words = text.split() if option.is_list else text
    config = Config().changed({name: words})
    value = option.value_in(user_code.located(config))
    return {name: list(value) if isinstance(value, tuple) else value}


def options(cell: dict, extra: Sequence[str] = ()) -> list[str]:
    """The command line of a cell's run, with the options that all runs are given."""
    words = []
    if "of" in cell:  # the loss of a replay does not take the options of the recorded run's loss
        cell = {"algo": cell["algo"], "algo_args": cell.get("algo_args", [])}
    for name, value in cell.items():
        if isinstance(value, bool):
            words.append(switch(name, value))
        elif isinstance(value, list):
            words += [f"--{flag(name)}", *value]
        else:
            words.append(f"--{flag(name)}={value}")
    return [*words, *extra]


def cell_name(cell: dict) -> str:
    """Name of a cell's run."""
    letters = {"async_ratio": "a", "publish_delay": "k"}
    parts = [loss(cell)]
    for name, value in setting(cell).items():
        is_named = name not in letters and "of" not in cell
        parts.append(f"{letters.get(name, '')}{f'{name}=' if is_named else ''}{show(value)}")
    if "seed" in cell:
        parts.insert(3, f"s{cell['seed']}")
    return re.sub(r"[^\w.+=-]", "+", "-".join(parts))


def grid(axes: dict[str, list[dict]]) -> list[dict]:
    """All cells, seeds outermost: a grid that is stopped early has whole seeds, and a busy hour falls on all alike.

    Raises ValueError if two axes give one option, or a cell is there twice.
    """
    swept = (name for name in axes if name not in AXES)
    order = ["seed", "publish_delay", "async_ratio", *swept, "algo_args", "algo"]
    cells = {}
    for values in itertools.product(*(axes.get(name, [{}]) for name in order)):
        merged = {
            name: value for options_of_axis in values for name, value in options_of_axis.items()
        }
        cell = {name: merged[name] for name in dict.fromkeys([*AXES, *merged]) if name in merged}
        if len(merged) < sum(map(len, values)) or key(cell) in cells:
            twice = f"{cell_name(cell)}, or an option of it, is there twice"
            raise ValueError(f"{twice}; name each value and option once")
        cells[key(cell)] = cell
    return list(cells.values())


def checked(cells: list[dict], extra: Sequence[str]) -> list[dict]:
    """The cells. Raises ValueError if a run would not accept one, or `extra` gives an option of the grid.

    A cell is options, and the command line of all runs is read once. Seeds differ by nothing else, so one is tried.
    """
    flags_of_extra = {word.partition("=")[0].replace("_", "-") for word in extra}
    common = read_options([*extra]).as_dict()
    tried = set()
    for cell in cells:
        if cell.get("kind") == RECORDED or key(cell | {"seed": 0}) in tried:
            continue
        tried.add(key(cell | {"seed": 0}))
        chosen = {name: value for name, value in cell.items() if name in OPTIONS}
        config = Config.from_dict(common | chosen)
        try:
            for name in chosen:
                given = OPTIONS[name].value_in(config)
                if f"--{flag(name)}" in flags_of_extra and common[name] != given:
                    raise ValueError(f"--{flag(name)} is the grid's; give it before --")
            if "of" not in cell:  # a replay's other options are those of its recorded run
                check(config.checked())
        except ValueError as error:
            raise ValueError(f"cell {cell_name(cell)}: {error}") from None
    return cells


def cells_of(arguments: argparse.Namespace) -> list[dict]:
    """The cells that the command line asks for. Raises ValueError if a run would not accept one."""
    losses = [read_value("algo", algo) for algo in arguments.algos]
    if arguments.replay:
        cells = []
        for run in arguments.replay:
            name, config = run.resolve().name, load(run).info["config"]
            recorded = {
                option: config[option] for option in ("algo", "algo_args") if config.get(option)
            }
            cells.append({"kind": RECORDED, "of": name, **recorded})
            cells += [{"kind": "replay", "of": name, **chosen} for chosen in losses]
        return checked(cells, arguments.extra)
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    axes = {"algo": losses, "seed": [{"seed": seed} for seed in range(arguments.seeds)]}
    for name in ("async_ratio", "publish_delay"):
        axes[name] = [read_value(name, text) for text in getattr(arguments, name)]
    for sweep in arguments.sweep:
        name, separator, values = sweep.partition("=")
        name = name.replace("-", "_")
        if not separator:
            raise ValueError(f"--sweep takes OPTION=V1|V2, as in lr=0.001|0.0003, got {sweep!r}")
        if name in axes:
            own = "--algos, --async-ratio, --publish-delay and --seeds are options of this script"
            raise ValueError(
                f"--sweep {flag(name)} has values already; sweep an option once, and {own}"
            )
        axes[name] = [read_value(name, value) for value in values.split("|")]
    return checked(grid(axes), arguments.extra)


def study(names: Sequence[str]) -> dict[str, tuple[list[dict], list[str]]]:
    """The chosen parts of study.toml, or all: cells, whole seeds first over all grids, and options of every run.

    Raises ValueError for a part that there is not.
    """
    chosen = {}
    for name in names or STUDY:
        if name not in STUDY:
            parts = f"{', '.join(STUDY)}{nearest(name, STUDY)}"
            raise ValueError(f"--study {name}: the parts are {parts}")
        extra = shlex.split(STUDY[name]["extra"])
        grids = [shlex.split(words) for words in STUDY[name]["grids"]]
        cells = [
            cell for words in grids for cell in cells_of(read_arguments([*words, "--", *extra]))
        ]
        chosen[name] = sorted(cells, key=lambda cell: cell["seed"]), extra
    return chosen


# Runs


def run_cell(cell: dict, command: Sequence[str], keep_in: Path | None = None) -> dict:
    """Run one cell to its end by a command without the place of its run; `keep_in` keeps that directory.

    An error that the run states (a loss not finite) is a result. Raises ValueError if it states none or made no step.
    """
    name, start, record = cell_name(cell), time.monotonic(), {"cell": cell}
    with tempfile.TemporaryDirectory(prefix="ablate-") as folder:
        runs = keep_in or Path(folder)
        runs.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(runs / name, ignore_errors=True)  # of a grid that was interrupted
        words = [*command, f"--runs-dir={runs.resolve()}", f"--run-name={name}"]
        job = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        record["seconds"] = round(time.monotonic() - start, 1)
        if job.returncode:
            lines = [line for line in job.stderr.splitlines() if line.startswith("error: ")]
            if not lines:  # killed for memory, say
                reason = f"was killed or broke, which is no result: {job.stderr[-500:].strip()}"
                raise ValueError(f"cell {name} {reason}")
            record["error"] = lines[0]
        try:
            return record | record_of(load(runs / name), cell)
        except ValueError as error:
            raise ValueError(f"cell {name} has no metrics: {record.get('error', error)}") from None


def run_missing(
    cells: list[dict], path: Path, run: Callable, extra: Sequence[str] = (), parallel: int = 1
) -> None:
    """Run the cells that are not finished by run(cell), `parallel` at a time, and append each record as it comes.

    After an error no other cell is started. It is raised when those that run have ended and are kept. Ctrl-C also
    ends the runs themselves: that is not a result of theirs, so none of them is kept.
    """
    finished, failures = {key(record["cell"]): record for record in read_records(path)}, []
    missing = [cell for cell in cells if key(cell) not in finished]
    for cell in (cell for cell in cells if key(cell) in finished):
        before, now = finished[key(cell)]["options"], options(cell, extra)
        if before != now:
            changed = f"{shlex.join(before)}, not {shlex.join(now)}"
            raise ValueError(f"{cell_name(cell)} ran with {changed}; give another --out")
    num_finished = len(cells) - len(missing)
    print(f"{len(cells)} cells, {num_finished} of them finished before; {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)

    def attempt(cell: dict) -> None:
        if failures:
            return
        try:
            record = run(cell) | {"options": options(cell, extra)}
        except Exception as error:
            failures.append(error)
            return
        if KeyboardInterrupt in map(type, failures):
            return
        with open(path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        accuracy = record["evaluations"][-1][1] if record["evaluations"] else float("nan")
        result = record.get("error", f"held-out accuracy {accuracy:.3f}")
        print(f"{cell_name(cell)}: {result}", flush=True)

    # Raised instead, it could fall anywhere into the pool's own locks.
    handler = signal.signal(signal.SIGINT, lambda *_: failures.append(KeyboardInterrupt()))
    with ThreadPoolExecutor(parallel) as pool:
        pool.map(attempt, missing)
    signal.signal(signal.SIGINT, handler)
    if failures:
        raise failures[0]


def run_grid(arguments: argparse.Namespace, cells: list[dict], out: Path) -> None:
    """Run what is missing of a grid, and report. Raises ValueError as `run_missing` and `report` do."""
    recorded = {run.resolve().name: run.resolve() for run in arguments.replay}
    keep_in = out / "runs" if arguments.keep_runs else None

    def run(cell: dict) -> dict:
        if cell.get("kind") == RECORDED:
            return {"cell": cell} | record_of(load(recorded[cell["of"]]), cell)
        command = [*REPLAY, str(recorded[cell["of"]]), "--evaluate"] if recorded else TRAIN
        return run_cell(cell, [*command, *options(cell, arguments.extra)], keep_in)

    if not arguments.report:
        path = out / ("replays.jsonl" if recorded else "cells.jsonl")
        run_missing(cells, path, run, arguments.extra, arguments.parallel)
    report(out)


# The command line


def read_arguments(args: list[str] | None = None) -> argparse.Namespace:
    """The command line, `args` or that of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    losses = ["grpo", "tis", "topr"]
    text = "losses, each with its options if it has any (default: grpo tis topr)"
    add("--algos", nargs="+", default=losses, metavar="ALGO[:NAME=VALUE ...]", help=text)
    text = "freshness bounds (default: 0 4)"
    add("--async-ratio", nargs="+", default=["0", "4"], metavar="ALPHA", help=text)
    text = "steps that weights are late (default: 0)"
    add("--publish-delay", nargs="+", default=["0"], metavar="K", help=text)
    add("--seeds", type=int, default=3, metavar="N", help="seeds 0 … N − 1 (default: 3)")
    text = "values of any option of train_async.py, a list's items apart by blanks; may be given several times"
    add("--sweep", action="append", default=[], metavar="OPTION=V1|V2", help=text)
    text = "replay these runs with each of --algos"
    add("--replay", nargs="+", default=[], type=Path, metavar="RUN", help=text)
    text = "run these parts of study.toml, or all; --out, --parallel, --keep-runs and --report alone go with it"
    add("--study", nargs="*", metavar="PART", help=text)
    text = "where records, tables and the figure go; unset makes runs/ablation-DATE-TIME"
    add("--out", type=Path, help=text)
    add("--keep-runs", action="store_true", help="keep the directories of the runs, in OUT/runs")
    text = "runs at a time; above 1, times mean less (default: 1)"
    add("--parallel", type=int, default=1, metavar="N", help=text)
    text = "run nothing, make the tables and the figure of --out again"
    add("--report", action="store_true", help=text)
    add("extra", nargs="*", metavar="-- --option=value", help="options of every run")
    arguments, unknown = parser.parse_known_args(args)
    if unknown:
        words = " ".join(unknown)
        parser.error(f"unrecognized arguments: {words}; options of every run go after --")
    return arguments


def main() -> None:
    """Read the command line, run what is missing, report."""
    arguments = read_arguments()
    is_study = arguments.study is not None
    name = "study" if is_study else time.strftime("ablation-%Y%m%d-%H%M%S")
    out = arguments.out or Path("runs") / name
    try:
        if is_study:
            parts = study(arguments.study)
            parallel = arguments.parallel
            for part, (cells, extra) in parts.items():
                arguments.extra = extra
                arguments.parallel = min(parallel, STUDY[part].get("parallel", parallel))
                run_grid(arguments, cells, out / part)
            return
        if arguments.report and not arguments.out:
            raise ValueError("--report needs --out, the directory of a grid")
        run_grid(arguments, [] if arguments.report else cells_of(arguments), out)
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same --out continues: --out {shlex.quote(str(out))}")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
