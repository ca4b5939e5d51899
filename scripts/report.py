"""Report on one run: `python scripts/report.py RUN [--trace]`, RUN a directory with metrics.jsonl and run.json.

Writes RUN/report.html, one page that needs nothing else: what was run, curves, a timeline of trainer and workers, where
groups, tokens and time went, and samples. --trace also writes RUN/trace.json, which https://ui.perfetto.dev opens.
A run that is still going, or was killed, is reported as far as it got.
"""

import argparse
import dataclasses
import json
import re
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from config import Config
from records.time_ledger import WORKER_STATES
from scripts.plot import TABLE, Metrics, evaluations, samples_by_version, seconds_by_version, summarise
from scripts.report_page import Chart, Page, Series, Table, render
from scripts.timeline import STATE_COLORS, Timeline, build_timeline, trace

NUM_SAMPLES = 10
STILL_GOING_S = 60
"""A run whose last record is younger may be going on."""
BLUE, ORANGE = "#2f6fb5", "#d9772b"
LAG_COLORS = {
    "0": "#6fb1e8", "1": "#3f83cc", "2": "#4457b0", "3-4": "#7a3fa5", "5-8": "#a8266f", "9+": "#8c1030",
}  # fmt: skip
"""Of the lag buckets of trainer/lag_stats.py, which needs torch; fresh to stale."""


@dataclass(frozen=True)
class Records:
    """What a run has written."""

    run: dict
    metrics: Metrics
    events: list[dict]
    samples: list[dict]
    cut: list[str]
    """Files whose last line was being written when the run ended, or when they were read."""


def read_records(path: Path) -> Records:
    """Read a run's directory; a file whose last line is half written is read without it.

    Raises ValueError, one line, if the run is not there, has not finished a step, or a line in its files is broken.
    """
    for name in ("metrics.jsonl", "run.json"):
        if not (path / name).exists():
            raise ValueError(f"{path / name} does not exist; give the directory of a run, as in runs/NAME")
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path / 'run.json'} is not JSON: {error}; restore it, or take another run") from None
    cut: list[str] = []
    metrics, events, samples = (read_lines(path / f"{name}.jsonl", cut) for name in ("metrics", "events", "samples"))
    if not metrics:
        raise ValueError(
            f"{path / 'metrics.jsonl'} is empty: the run has not finished a step; wait for it, or see worker_*.log"
        )
    return Records(run, metrics, events + events_of_other_nodes(path, cut), samples, cut)


def events_of_other_nodes(path: Path, cut: list[str]) -> list[dict]:
    """What the workers of the other nodes did: worker W of node N is called `N.W`."""
    events = []
    for folder in sorted(path.glob("node_*"), key=lambda folder: int(folder.name.removeprefix("node_"))):
        node = folder.name.removeprefix("node_")
        for event in read_lines(folder / "events.jsonl", cut):
            if "worker" in event:
                events.append(event | {"worker": f"{node}.{event['worker']}"})
            elif event["event"] == "evaluation":
                events.append(event)
    return events


def read_lines(path: Path, cut: list[str]) -> list[dict]:
    """The records of a JSON-lines file, none if it is not there; `cut` gets its name if its last line is half written.

    Raises ValueError for a line that is not JSON.
    """
    if not path.exists():
        return []
    text, records = path.read_text(encoding="utf-8"), []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and not text.endswith("\n"):
                cut.append(path.name)
                break
            where = f"{path}, line {number} of {len(lines)}"
            raise ValueError(f"{where} is not JSON: {error}; mend or delete the line") from None
    return records


def make_page(name: str, records: Records, timeline: Timeline, now: float) -> Page:
    """Put together what the page of a run shows; `now` is the Unix time."""
    drawn, missing = charts(records.metrics)
    summary = summarise(records.metrics)
    numbers = {label: (template, summary[key]) for key, (label, template) in TABLE.items()}
    return Page(
        title=f"{name}: {records.run['config']['algo']} on {records.run['config']['task']}",
        facts=facts(records, timeline, now),
        numbers={label: form.format(number) for label, (form, number) in numbers.items() if number is not None},
        charts=drawn,
        missing=missing if records.events else [*missing, "Timeline"],
        timeline=timeline if records.events else None,
        tables=[
            *ledgers(records.metrics),
            *([trainer_time(records.metrics, timeline)] if _states_of(records.metrics, "trainer") else []),
            *([workers_time(timeline)] if _worker_states(timeline) else []),
        ],
        samples=spread(records.samples, NUM_SAMPLES),
    )


# Header


def facts(records: Records, timeline: Timeline, now: float) -> dict[str, str]:
    """What was run, on what, how it differs from the default job, and how it ended."""
    run = records.run
    hardware = run["hardware"]
    shown = {
        "command": shlex.join(run["command"]),
        "outcome": outcome(records, timeline, now),
        "started": run["started_at"] + (f", lasted {duration(timeline.duration)}" if records.events else ""),
        "options": changed_options(run["config"]) or "all at their defaults",
        "commit": commit(run["git_commit"], run["git_diff"]),
        "hardware": f"{hardware['cpu_cores']} CPU cores ({hardware['cpu']}), {_gpus(hardware['gpus'])}; "
        f"{run['world_size']} trainer rank{'s' * (run['world_size'] > 1)}",
        "packages": ", ".join(f"{name} {version}" for name, version in run["packages"].items())
        + f", Python {run['python']}",
    }
    for event in records.events:
        if event["event"] == "advice":
            shown["advice"] = next(line.strip() for line in event["text"].splitlines() if "advice:" in line)
    if records.cut:
        shown["left out"] = f"the last line of {', '.join(records.cut)}, which is half written"
    return shown


def outcome(records: Records, timeline: Timeline, now: float) -> str:
    """Whether all steps were made, and what stopped the run if it says so."""
    done, wanted = records.metrics[-1]["step"], records.run["config"]["steps"]
    deaths = sum(mark.kind == "died" for lane in timeline.lanes for mark in lane.marks)
    suffix = f"; worker deaths: {deaths}" if deaths else ""
    if done >= wanted:
        return f"finished: all {wanted} steps{suffix}"
    for event in records.events:
        if event["event"] == "run_ended":
            return f"ended early: {done} of {wanted} steps; {event['reason']}{suffix}"
    age = now - timeline.start - timeline.duration
    if age < STILL_GOING_S:
        return f"still going, or ended just now: {done} of {wanted} steps, last record {age:.0f} s ago{suffix}"
    return f"ended early: {done} of {wanted} steps; worker_*.log, or what the run printed, may say why{suffix}"


def changed_options(config: dict) -> str:
    """The options that are not at the default of this version of config.py."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    changed = {name: value for name, value in config.items() if name not in defaults or value != defaults[name]}
    return ", ".join(f"{name} = {value}" for name, value in changed.items())


def commit(sha: str | None, diff: str | None) -> str:
    """The commit, and how much of it had been changed."""
    if sha is None:
        return "unknown: not run from a git checkout"
    if not diff:
        return f"{sha}, clean"
    lines = diff.splitlines()
    files = [match[1] for line in lines if (match := re.match(r"diff --git a/.* b/(.*)", line))]
    added, removed = (sum(line.startswith(sign) and not line.startswith(3 * sign) for line in lines) for sign in "+-")
    return f"{sha}, dirty: +{added} −{removed} lines in {', '.join(files)} (git_diff in run.json)"


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def _gpus(names: list[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"


# Curves


def charts(metrics: Metrics) -> tuple[list[Chart], list[str]]:
    """The charts that have data, and the names of what is not there to be drawn."""
    title, seconds = "Reward and held-out accuracy over", "seconds since the first step began"
    staleness = [*_line(metrics, "staleness/mean", "mean", BLUE), *_line(metrics, "staleness/max", "max", ORANGE)]
    possible = [
        Chart(f"{title} samples", "samples", _rewards(metrics, samples_by_version(metrics))),
        Chart(f"{title} time", seconds, _rewards(metrics, seconds_by_version(metrics))),
        Chart("Staleness of trajectories, steps", "step", staleness),
        Chart("Trainer's time, share of each step", "step", _states_of(metrics, "trainer")),
        Chart("Workers' time, share, all workers together", "step", _states_of(metrics, "worker")),
        Chart("Entropy, nats per token", "step", _line(metrics, "loss/entropy", "entropy", BLUE)),
        Chart("Clip fraction by lag, steps", "step", _by_lag(metrics, "loss/clipped")),
        Chart("Effective sample size by lag, steps", "step", _by_lag(metrics, "loss/ess")),
    ]
    missing = [chart.title for chart in possible if not chart.series]
    if not evaluations(metrics):
        missing.insert(0, "Held-out accuracy")
    return [chart for chart in possible if chart.series], missing


def _rewards(metrics: Metrics, x_of_version: dict[int, float]) -> list[Series]:
    """Reward where its step ended; accuracy where its version was made, whenever it was reported."""
    rewards = _points(metrics, "reward/mean", x_of_version)
    accuracies = [(x_of_version[version], y) for version, y in evaluations(metrics) if version in x_of_version]
    series = [Series("reward", BLUE, rewards), Series("held-out accuracy", ORANGE, accuracies, marked=True)]
    return [one for one in series if one.points]


def _line(metrics: Metrics, name: str, label: str, color: str) -> list[Series]:
    """The series of a metric over steps, if it has been recorded."""
    points = _points(metrics, name, {line["step"]: line["step"] for line in metrics})
    return [Series(label, color, points)] if points else []


def _by_lag(metrics: Metrics, name: str) -> list[Series]:
    """A series per lag bucket that had tokens."""
    lines = [_line(metrics, f"{name}/lag_{lag}", f"lag {lag}", color) for lag, color in LAG_COLORS.items()]
    return [series for line in lines for series in line]


def _states_of(metrics: Metrics, who: str) -> list[Series]:
    """A series per state in which trainer or workers spent any time."""
    lines = [_line(metrics, f"{who}_time/{state}", state, color) for state, color in STATE_COLORS.items()]
    return [series for line in lines for series in line if any(y for _, y in series.points)]


def _points(metrics: Metrics, name: str, x_of_step: dict[int, float]) -> list[tuple[float, float]]:
    return [(x_of_step[line["step"]], line[name]) for line in metrics if line.get(name) is not None]


# Ledgers


def ledgers(metrics: Metrics) -> list[Table]:
    """Where all groups and tokens of the run went; nothing of a replay, which samples none."""
    if "ledger/groups_issued" not in metrics[-1]:
        return []
    return [fates(metrics, "groups", "issued"), fates(metrics, "tokens", "generated")]


def fates(metrics: Metrics, unit: str, source: str) -> Table:
    """Where all groups or tokens of the run went, from the last line's ledger."""
    prefix = f"ledger/{unit}_"
    ledger = {name.removeprefix(prefix): n for name, n in metrics[-1].items() if name.startswith(prefix)}
    total = ledger.pop(source)
    rows = [[fate.replace("_", ": "), str(count), _share(count, total)] for fate, count in ledger.items()]
    rows.append([source, str(total), _share(total, total)])
    notes = {
        "groups": "Resident groups were running, or finished and not yet trained on, after the last step recorded.",
        "tokens": "Tokens of a response count when it has ended; those that were thrown away when it was started over "
        "count as dropped: aborted.",
    }
    return Table(f"Where the {unit} went", ["", unit, "share"], rows, notes[unit])


def trainer_time(metrics: Metrics, timeline: Timeline) -> Table:
    """Where the time of the trainer's steps went; the states sum to all of it."""
    spent: Counter[str] = Counter()
    for line in metrics:
        for state in STATE_COLORS:
            spent[state] += line.get(f"trainer_time/{state}", 0.0) * line["time/step_s"]
    total = spent.total()
    rows = [[state, f"{s:.2f}", _share(s, total)] for state, s in spent.items() if s]
    rows.append(["all steps", f"{total:.2f}", _share(total, total)])
    return Table("Where the trainer's time went", ["state", "seconds", "share"], rows, _around_steps(timeline))


def workers_time(timeline: Timeline) -> Table:
    """Where the time of the workers went, from their starts to their ends; the states sum to all of it."""
    of_worker = _worker_states(timeline)
    together = sum(of_worker.values(), Counter())
    rows = []
    for state, spent in sorted(together.items(), key=lambda pair: -pair[1]):
        each = [worker[state] / worker.total() for worker in of_worker.values()]
        rows.append([state, f"{spent:.2f}", _share(spent, together.total()), f"{min(each):.1%} … {max(each):.1%}"])
    rows.append(["all workers", f"{together.total():.2f}", _share(1, 1), ""])
    headings = ["state", "worker-seconds", "share", "of one worker"]
    return Table("Where the workers' time went", headings, rows, "What the states mean is in records/time_ledger.py.")


def _worker_states(timeline: Timeline) -> dict[str, Counter[str]]:
    """Seconds of each worker in each state, and for each reason where there are several."""
    of_worker: dict[str, Counter[str]] = {}
    for lane in timeline.lanes[2:]:
        spent: Counter[str] = Counter()
        for bar in lane.bars:
            if bar.kind in WORKER_STATES:
                why = bar.details.get("why")
                spent[f"{bar.kind}: {why}" if why else bar.kind] += bar.end - bar.start
        if spent:
            of_worker[lane.name] = spent
    return of_worker


def _around_steps(timeline: Timeline) -> str:
    """What of the run's time lies outside its steps."""
    steps = [bar for bar in timeline.lanes[0].bars if bar.kind == "step"]
    if not steps:
        return "Rank 0; the run has no events that say what lies around its steps."
    before, after = min(bar.start for bar in steps), timeline.duration - max(bar.end for bar in steps)
    return (
        f"Rank 0. Besides, {duration(before)} before the first step (workers starting, first weights) and "
        f"{duration(after)} after the last (its records, a last evaluation) until the last event."
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def spread(items: list, count: int) -> list:
    """At most `count` items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def write_report(path: Path, with_trace: bool) -> list[Path]:
    """Write what was asked for into the run's directory. Returns the files.

    Raises ValueError as read_records does.
    """
    records = read_records(path)
    timeline = build_timeline(records.run, records.events)
    page = make_page(path.resolve().name, records, timeline, time.time())
    texts = {"report.html": render(page)}
    if with_trace:
        texts["trace.json"] = json.dumps(trace(timeline))
    for name, text in texts.items():
        (path / name).write_text(text, encoding="utf-8")
    return [path / name for name in texts]


def main() -> None:
    """Read the command line, write the report, and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a run")
    parser.add_argument("--trace", action="store_true", help="also write trace.json, for https://ui.perfetto.dev")
    arguments = parser.parse_args()
    try:
        written = write_report(arguments.run, arguments.trace)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for path in written:
        print(f"{path.stem}: {path}")


if __name__ == "__main__":
    main()
