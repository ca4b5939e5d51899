"""A grid of real runs, its tables and its figure.

    python scripts/ablate.py --algos grpo grpo:clip_high=0.4 tis --async-ratio 0 --publish-delay 0 4 --seeds 3
    python scripts/ablate.py --algos grpo --sweep 'lr=0.001|0.0003' --sweep 'share_prefix=off|tree' -- --steps 40
    python scripts/ablate.py --replay runs/A runs/B --algos tis topr    # on the batches of runs made with --record
    python scripts/ablate.py --study lag --parallel 2                   # a part of docs/staleness.md, or all of it

Every combination is one cell: one `torchrun train_async.py`, all with the same number of steps. A finished cell is a
line of OUT/cells.jsonl and is not run again: the same --out goes on where it stopped. What follows `--` is handed to
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

from asyncrl.config import OPTIONS, allowed_values, flag, nearest, switch
from asyncrl.job.command_line import check, read_options
from scripts.grids import RECORDED, key, loss, read_records, record_of, report
from scripts.runs import load
from scripts.table import show

ROOT = Path(__file__).resolve().parent.parent
TRAIN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "train_async.py")
NAMED = "ablation-%Y%m%d-%H%M%S"
STUDY = tomllib.loads((ROOT / "scripts" / "study.toml").read_text(encoding="utf-8"))
REPLAY = (sys.executable, "scripts/replay.py")


def read_value(name: str, text: str) -> dict:
    """One value of an option; that of `algo` may have the loss's own options behind a colon. Raises ValueError."""
    algo, own = re.fullmatch(r"(.*?)(?::(\w+=.*))?", text).groups()
    if name == "algo" and own:
        return read_value("algo", algo) | read_value("algo_args", own)
    option = OPTIONS.get(name)
    default = option and option.default
    is_switch = option is not None and allowed_values(option.kind) == "true or false"
    if is_switch and text not in ("true", "false"):
        raise ValueError(f"--{flag(name)} is true or false, got {text!r}")
    value = text == "true" if is_switch else text.split() if isinstance(default, tuple) else text
    value = read_options(options({name: value})).as_dict()[name]
    return {name: list(value) if isinstance(value, tuple) else value}


def options(cell: dict, extra: Sequence[str] = ()) -> list[str]:
    """The command line of a cell's run, with the options that all runs are given."""
    words = []
    if "of" in cell:  # the recorded run's own options of its loss are not for another
        cell = {"algo": cell["algo"], "algo_args": cell.get("algo_args", [])}
    for name, value in cell.items():
        if isinstance(value, bool):
            words.append(switch(name, value))
        else:
            words += (
                [f"--{flag(name)}", *value]
                if isinstance(value, list)
                else [f"--{flag(name)}={value}"]
            )
    return [*words, *extra]


def cell_name(cell: dict) -> str:
    """Name of a cell's run."""
    short = {"async_ratio": "a", "publish_delay": "k", "seed": "s"}
    parts = [f"{letter}{cell[name]:g}" for name, letter in short.items() if name in cell]
    others = {
        name: show(value)
        for name, value in cell.items()
        if name not in (*short, "algo", "algo_args")
    }
    parts += (
        others.values() if "of" in cell else [f"{name}={value}" for name, value in others.items()]
    )
    return re.sub(r"[^\w.+=-]", "+", "-".join([loss(cell), *parts]))


def grid(axes: dict[str, list[dict]]) -> list[dict]:
    """All cells, seeds outermost: a grid that is stopped early has whole seeds, and a busy hour falls on all alike.

    Raises ValueError if two axes say something of one option, or a cell is there twice.
    """
    named, cells = ("algo", "algo_args", "async_ratio", "publish_delay", "seed"), {}
    order = [
        "seed",
        "publish_delay",
        "async_ratio",
        *(name for name in axes if name not in named),
        "algo_args",
        "algo",
    ]
    for parts in itertools.product(*(axes.get(name, [{}]) for name in order)):
        merged = {name: value for part in parts for name, value in part.items()}
        cell = {name: merged[name] for name in dict.fromkeys([*named, *merged]) if name in merged}
        if len(merged) < sum(map(len, parts)) or key(cell) in cells:
            raise ValueError(
                f"{cell_name(cell)}, or an option of it, is there twice; name each value and option once"
            )
        cells[key(cell)] = cell
    return list(cells.values())


def run_cell(cell: dict, command: Sequence[str], keep_in: Path | None = None) -> dict:
    """Run one cell to its end by a command, all but where its run goes; `keep_in` keeps that directory.

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
                raise ValueError(
                    f"cell {name} was killed or broke, which is no result: {job.stderr[-500:].strip()}"
                )
            record["error"] = lines[0]
        try:
            return record | record_of(load(runs / name), cell)
        except ValueError as error:
            raise ValueError(f"cell {name} has no metrics: {record.get('error', error)}") from None


def run_missing(
    cells: list[dict], path: Path, run: Callable, extra: Sequence[str] = (), parallel: int = 1
) -> None:
    """Run the cells that are not finished by run(cell), `parallel` at a time, and append each record as it comes.

    After an error no other cell is started; it is raised when those that run have ended and are kept. Ctrl-C also
    ends the runs themselves: that is not a result of theirs, so none of them is kept.
    """
    finished, failures = {key(record["cell"]): record for record in read_records(path)}, []
    for cell in cells:
        was = finished.get(key(cell), {}).get("options", options(cell, extra))
        if was != (now := options(cell, extra)):
            raise ValueError(
                f"{cell_name(cell)} ran with {shlex.join(was)}, not {shlex.join(now)}; give another --out"
            )
    missing = [cell for cell in cells if key(cell) not in finished]
    print(
        f"{len(cells)} cells, {len(cells) - len(missing)} of them finished before; {path}",
        flush=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)

    def attempt(cell: dict) -> None:
        try:
            record = None if failures else run(cell) | {"options": options(cell, extra)}
            if record is None or KeyboardInterrupt in map(type, failures):
                return
            with open(path, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
            last = record["evaluations"][-1][1] if record["evaluations"] else float("nan")
            print(
                f"{cell_name(cell)}: {record.get('error', f'held-out accuracy {last:.3f}')}",
                flush=True,
            )
        except Exception as error:
            failures.append(error)

    # Raised instead, it could fall anywhere into the pool's own locks.
    before = signal.signal(signal.SIGINT, lambda *_: failures.append(KeyboardInterrupt()))
    with ThreadPoolExecutor(parallel) as pool:
        pool.map(attempt, missing)
    signal.signal(signal.SIGINT, before)
    if failures:
        raise failures[0]


def add_grid(add: Callable) -> None:
    """Add the options that say which runs there are."""
    text = "losses, each with options of its own if it has any (default: grpo tis topr)"
    add(
        "--algos",
        nargs="+",
        default=["grpo", "tis", "topr"],
        metavar="ALGO[:NAME=VALUE ...]",
        help=text,
    )
    add(
        "--async-ratio",
        nargs="+",
        default=["0", "4"],
        metavar="ALPHA",
        help="freshness bounds (default: 0 4)",
    )
    add(
        "--publish-delay",
        nargs="+",
        default=["0"],
        metavar="K",
        help="steps that weights are late (default: 0)",
    )
    add("--seeds", type=int, default=3, metavar="N", help="seeds 0 … N − 1 (default: 3)")
    text = "values of any option of train_async.py, a list's items apart by blanks; may be given several times"
    add("--sweep", action="append", default=[], metavar="OPTION=V1|V2", help=text)
    add(
        "--replay",
        nargs="+",
        default=[],
        type=Path,
        metavar="RUN",
        help="replay these runs with each of --algos",
    )


def add_output(add: Callable) -> None:
    """Add the options that say what becomes of the runs."""
    text = "run these parts of study.toml, or all; --out, --parallel, --keep-runs and --report alone go with it"
    add("--study", nargs="*", metavar="PART", help=text)
    add(
        "--out",
        type=Path,
        help="where records, tables and the figure go; unset makes runs/ablation-DATE-TIME",
    )
    add("--keep-runs", action="store_true", help="keep the directories of the runs, in OUT/runs")
    add(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time; above 1, times mean less (default: 1)",
    )
    add(
        "--report",
        action="store_true",
        help="run nothing, make the tables and the figure of --out again",
    )


def read_arguments(args: list[str] | None = None) -> argparse.Namespace:
    """The command line, `args` or that of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_grid(parser.add_argument)
    add_output(parser.add_argument)
    parser.add_argument(
        "extra", nargs="*", metavar="-- --option=value", help="options of every run"
    )
    arguments, unknown = parser.parse_known_args(args)
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}; options of every run go after --"
        )
    return arguments


def cells_of(arguments: argparse.Namespace) -> list[dict]:
    """The cells that the command line asks for. Raises ValueError if a run would not accept one."""
    losses, cells = [read_value("algo", algo) for algo in arguments.algos], []
    for run in arguments.replay:
        name, config = run.resolve().name, load(run).info["config"]
        own = {option: config[option] for option in ("algo", "algo_args") if config.get(option)}
        cells.append({"kind": RECORDED, "of": name, **own})
        cells += [{"kind": "replay", "of": name, **one} for one in losses]
    if cells:
        return checked(cells, arguments.extra)
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    axes = {"algo": losses, "seed": [{"seed": seed} for seed in range(arguments.seeds)]}
    for name in ("async_ratio", "publish_delay"):
        axes[name] = [read_value(name, text) for text in getattr(arguments, name)]
    for sweep in arguments.sweep:
        name, separator, values = sweep.partition("=")
        if not separator:
            raise ValueError(f"--sweep takes OPTION=V1|V2, as in lr=0.001|0.0003, got {sweep!r}")
        if (name := name.replace("-", "_")) in axes:
            own = "--algos, --async-ratio, --publish-delay and --seeds are options of this script"
            raise ValueError(
                f"--sweep {flag(name)} has values already; sweep an option once, and {own}"
            )
        axes[name] = [read_value(name, value) for value in values.split("|")]
    return checked(grid(axes), arguments.extra)


def checked(cells: list[dict], extra: Sequence[str]) -> list[dict]:
    """The cells. Raises ValueError if a run would not accept one, or `extra` says otherwise than it does."""
    first = [
        cell
        for cell in cells
        if cell.get("kind") != RECORDED and cell.get("seed") == cells[0].get("seed")
    ]
    flags_of_extra = {
        argument.partition("=")[0].replace("_", "-")
        for argument in extra
        if argument.startswith("--")
    }
    # to read all takes seconds, and other seeds differ by nothing else
    for cell in [*first, *cells[-1:]]:
        try:
            for name in (name for name in cell if f"--{flag(name)}" in flags_of_extra):
                of_extra, of_cell = read_options([*extra]), read_options(options(cell))
                if getattr(of_extra, name) != getattr(of_cell, name):
                    raise ValueError(f"--{flag(name)} is the grid's; give it before --")
            config = read_options(options(cell, extra))
            if "of" not in cell:  # a replay's other options are those of its recorded run
                check(config.checked())
        except ValueError as error:
            raise ValueError(f"cell {cell_name(cell)}: {error}") from None
    return cells


def run_grid(arguments: argparse.Namespace, cells: list[dict], out: Path) -> None:
    """Run what is missing of a grid, and report. Raises ValueError as `run_missing` and `report` do."""
    recorded, extra = (
        {run.resolve().name: run.resolve() for run in arguments.replay},
        arguments.extra,
    )

    def run(cell: dict) -> dict:
        if cell.get("kind") == RECORDED:
            return {"cell": cell} | record_of(load(recorded[cell["of"]]), cell)
        command = [*REPLAY, str(recorded[cell["of"]]), "--evaluate"] if recorded else TRAIN
        return run_cell(
            cell, [*command, *options(cell, extra)], out / "runs" if arguments.keep_runs else None
        )

    if not arguments.report:
        path = out / ("replays.jsonl" if recorded else "cells.jsonl")
        run_missing(cells, path, run, extra, arguments.parallel)
    report(out)


def study(names: Sequence[str]) -> dict[str, tuple[list[dict], list[str]]]:
    """The chosen parts of study.toml, or all: cells, whole seeds first over all grids, and options of every run.

    Raises ValueError for a part that there is not.
    """
    chosen = {}
    for name in names or STUDY:
        if name not in STUDY:
            raise ValueError(
                f"--study {name}: the parts are {', '.join(STUDY)}{nearest(name, STUDY)}"
            )
        extra = shlex.split(STUDY[name]["extra"])
        of_part = [
            read_arguments([*shlex.split(words), "--", *extra]) for words in STUDY[name]["grids"]
        ]
        cells = [cell for arguments in of_part for cell in cells_of(arguments)]
        chosen[name] = sorted(cells, key=lambda cell: cell["seed"]), extra
    return chosen


def main() -> None:
    """Read the command line, run what is missing, report."""
    arguments = read_arguments()
    out = arguments.out or Path("runs") / (
        "study" if arguments.study is not None else time.strftime(NAMED)
    )
    try:
        if arguments.study is not None:
            for name, (cells, extra) in study(arguments.study).items():
                at_most = STUDY[name].get("parallel", arguments.parallel)
                one = {"extra": extra, "parallel": min(arguments.parallel, at_most)}
                run_grid(argparse.Namespace(**vars(arguments) | one), cells, out / name)
            return
        if arguments.report and not arguments.out:
            raise ValueError("--report needs --out, the directory of a grid")
        run_grid(arguments, [] if arguments.report else cells_of(arguments), out)
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same --out goes on: --out {shlex.quote(str(out))}")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
