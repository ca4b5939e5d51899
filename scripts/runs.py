"""Read what a run has written, in a script or a notebook: `from scripts.runs import load; run = load("runs/NAME")`.

`run.metrics` has a row per step, under the names of metrics.jsonl. `run.events["trajectory"]` has a row per response.
Every other kind of event has a table, too. `node` is the place of an event: 0, or N for an event in node_N/.
`run.samples` has the readable responses, and `run.info` is run.json. A run that is still going, or was killed, is read
as far as it got.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from asyncrl.config import Config
from asyncrl.controller.failures import Failures
from asyncrl.runlog.header import nearest_run, read_header
from scripts.lines import read

SUMMARY = {
    "steps": ("steps", "{:.0f}"),
    "samples": ("samples", "{:.0f}"),
    "seconds": ("time in steps, s", "{:.1f}"),
    "reward_first": ("reward, first tenth of the steps", "{:.3f}"),
    "reward_last": ("reward, last tenth", "{:.3f}"),
    "accuracy_first": ("held-out accuracy, first", "{:.3f}"),
    "accuracy_last": ("held-out accuracy, last", "{:.3f}"),
    "staleness_mean": ("staleness, mean, steps", "{:.2f}"),
    "staleness_max": ("staleness, max, steps", "{:.3g}"),
    "seconds_per_step": ("s per step", "{:.2f}"),
    "tokens_per_s": ("generated tokens/s", "{:.0f}"),
    "wait_share": ("share of time the trainer waited", "{:.1%}"),
}
"""Numbers to look at first: key of `summarise`, label, format."""
MISSING = "–"


@dataclass(frozen=True)
class Run:
    """Files of a run. Events and samples are read when they are asked for."""

    path: Path
    info: dict
    """run.json."""
    metrics: pd.DataFrame
    """A row per step."""

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.path.resolve().name

    @cached_property
    def records(self) -> list[dict]:
        """The events of all nodes as they were written, each with its node, sorted by time."""
        folders = {0: self.path}
        for folder in self.path.glob("node_*"):
            folders[int(folder.name.removeprefix("node_"))] = folder
        records = []
        for node, folder in sorted(folders.items()):
            for record in read(folder / "events.jsonl", may_be_cut=True):
                records.append(record | {"node": node})
        return sorted(records, key=lambda record: record["time"])

    @cached_property
    def events(self) -> dict[str, pd.DataFrame]:
        """The events by kind; an empty frame for a kind that did not occur."""
        by_kind = defaultdict(list)
        for record in self.records:
            by_kind[record["event"]].append(record)
        frames = {kind: frame(records) for kind, records in by_kind.items()}
        return defaultdict(pd.DataFrame, frames)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """A row per readable response."""
        return frame(read(self.path / "samples.jsonl", may_be_cut=True))


def end_of(path: Path) -> str:
    """Return why a run in a directory ended early, from its last end; without one what to do."""
    events = path / "events.jsonl"
    ends = [
        record["reason"]
        for record in (read(events, may_be_cut=True) if events.exists() else ())
        if record["event"] == "run_ended"
    ]
    return f"it ended by {ends[-1]}" if ends and ends[-1] else "wait for it, or see worker_*.log"


def load(path: str | Path) -> Run:
    """Read a run's directory, or the log of nano_async.py: it has no events and no samples.

    Raises ValueError, one line, if the run does not exist, has not finished a step, or has a broken line.
    """
    path = Path(path)
    if path.is_file():
        return _load_log(path)
    if (path / "cells.jsonl").exists():
        where = f"its tables are {path / 'table.md'} and {path / 'paired.md'}"
        kept = f"ablate.py --keep-runs keeps runs for reports, in {path / 'runs'}"
        raise ValueError(f"{path} is an ablation; {where}; {kept}")
    for name in ("metrics.jsonl", "run.json"):
        if not (path / name).exists():
            what = "does not exist; give the directory of a run"
            raise ValueError(f"{path / name} {what}{nearest_run(path) or newest_run()}")
    try:
        info = read_header(path)
    except json.JSONDecodeError as error:
        what = f"is not JSON: {error}; restore it, or take another run"
        raise ValueError(f"{path / 'run.json'} {what}") from None
    metrics = read(path / "metrics.jsonl", may_be_cut=True)
    if not metrics:
        what = f"is empty: the run has not finished a step; {end_of(path)}"
        raise ValueError(f"{path / 'metrics.jsonl'} {what}")
    return Run(path, info, frame(metrics))


def _load_log(path: Path) -> Run:
    """Read the log of nano_async.py: a line with the options, then one for each step."""
    header, *metrics = read(path, may_be_cut=True) or [{}]
    if "config" not in header or not metrics:
        what = "has no options and steps; give the directory of a run, or a log of nano_async.py"
        raise ValueError(f"{path} {what}")
    for name in ("log", "log_file"):  # the first is in older logs
        header["config"].pop(name, None)
    return Run(path, header, frame(metrics))


def check_are_given(runs: Sequence[object]) -> None:
    """Raise ValueError if a command line has no run."""
    if not runs:
        raise ValueError(f"no run is given; give its directory{newest_run()}")


def newest_run() -> str:
    """Return the end of an error about a run: the newest run, or an example if there is none."""
    newest = max(Path(Config.runs_dir).glob("*/run.json"), key=os.path.getmtime, default=None)
    return f"; the newest is {newest.parent}" if newest else ", as runs/NAME"


def frame(records: list[dict]) -> pd.DataFrame:
    """Return a row per record and a column per name. A missing value is NA, and whole numbers stay whole (Int64)."""
    names = dict.fromkeys(name for record in records for name in record)
    columns = {}
    for name in names:
        values = [record.get(name) for record in records]
        is_whole = {type(value) for value in values} - {type(None)} == {int}
        columns[name] = pd.array(values, "Int64") if is_whole else values
    return pd.DataFrame(columns)


def names(runs: list[Run]) -> list[str]:
    """Return a name for each run: its directory's name if that is unique, else its path."""
    short = [run.name for run in runs]
    return [run.name if short.count(run.name) == 1 else str(run.path) for run in runs]


def evaluations(metrics: pd.DataFrame) -> pd.Series:
    """Return held-out accuracy by policy version; a line may report that of an earlier one."""
    if "eval/accuracy" not in metrics:
        return pd.Series(dtype=float)
    lines = []
    for line in metrics.to_dict("records"):
        # a line without evaluations, or with one, has no list
        earlier = line.get("eval/earlier")
        lines += [*(earlier if isinstance(earlier, list) else []), line]
    columns = ["eval/policy_version", "eval/accuracy"]
    evaluated = pd.DataFrame(lines, columns=columns).dropna()  # null: no response could be scored
    versions, accuracies = (evaluated[column] for column in columns)
    return pd.Series(accuracies.to_numpy(float), versions.to_numpy(int))


def progress(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return samples trained on and seconds of steps when each version existed, the first from before its step."""
    first = metrics["step"].iloc[0] - 1
    samples = [metrics["samples"].iloc[0] * first / (first + 1), *metrics["samples"]]
    seconds = [0.0, *metrics["time/step_s"].cumsum()]
    return pd.DataFrame({"samples": samples, "seconds": seconds}, [first, *metrics["step"]])


def summarise(metrics: pd.DataFrame) -> dict[str, float]:
    """Return a run as a few numbers; NaN for a number that was not measured.

    Rewards are means over the first and the last tenth of the steps, at least one. Accuracies belong to the oldest and
    the newest version evaluated.
    """
    rewards, staleness = metrics["reward/mean"], metrics["staleness/mean"]
    accuracies = evaluations(metrics)
    tenth = max(1, len(metrics) // 10)
    seconds = metrics["time/step_s"].sum()
    # A replay does not sample.
    rollout = metrics.reindex(columns=["tokens/generated", "time/wait_s"]).astype(float)
    last = metrics.iloc[-1]
    return {
        "steps": int(last["step"]),
        "samples": int(last["samples"]),
        "seconds": seconds,
        "seconds_per_step": seconds / last["step"],
        "reward_first": rewards.head(tenth).mean(),
        "reward_last": rewards.tail(tenth).mean(),
        "accuracy_first": accuracies.head(1).mean(),
        "accuracy_last": accuracies.tail(1).mean(),
        "staleness_mean": staleness.mean(),
        "staleness_max": int(metrics["staleness/max"].max()),
        "tokens_per_s": rollout["tokens/generated"].iloc[-1] / seconds,
        "wait_share": rollout["time/wait_s"].sum(min_count=1) / seconds,
    }


def failures(run: Run) -> dict[str, str]:
    """Return the share of failed responses, with reasons, in training and in evaluations; empty without failures."""
    counts = {"failures": Failures(), "failures in evaluations": Failures()}
    for record in run.records:
        if record["event"] == "trajectory" and record["finish_reason"] != "aborted":
            what = "failures" if record["group"] >= 0 else "failures in evaluations"
            counts[what].count(record.get("failure", ""))
    last = run.metrics.iloc[-1]
    share = last.get("rollout/failed_groups") or 0.0
    if share > 0:
        num_failed = int(last["ledger/groups_dropped_failed"])
        counts["failures"].num_failed_groups = num_failed
        counts["failures"].num_groups = round(num_failed / share)
    return {what: str(count) for what, count in counts.items() if count.reasons}


def readable_summary(metrics: pd.DataFrame) -> dict[str, str]:
    """Return what people look at first, by its label."""
    summary = summarise(metrics)
    return {label: spread([summary[key]], form) for key, (label, form) in SUMMARY.items()}


def spread(values: Iterable[float], form: str) -> str:
    """Return mean ± standard deviation in the format of one number; the number itself where all are equal."""
    measured = pd.Series(values, dtype=float).dropna()
    if measured.empty:
        return MISSING
    mean = form.format(measured.mean())
    if measured.nunique() == 1:
        return mean
    return f"{mean} ± {form.format(measured.std())}"
