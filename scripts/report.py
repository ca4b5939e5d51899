"""Report on runs: `python scripts/report.py RUN [RUN ...] [--trace]`. RUN is the directory of a run.

It prints a summary. For one run it writes RUN/report.html, a page that needs no other file. The page has options,
curves, a timeline of trainer and workers, the ledgers of groups, tokens and time, and samples. The option --trace also
writes RUN/trace.json for https://ui.perfetto.dev. For several runs it writes comparison.html into the first. That page
has their differences, every curve with a line per run, and samples of each. A run that still trains, or was killed, is
reported as far as it got.
"""

import base64
import gzip
import inspect
import json
import math
import os
import re
import shlex
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from tyro.conf import Positional

from asyncrl import extras
from asyncrl.config import Config
from asyncrl.job.arrival import ALLOWED_MISMATCH, SURE
from asyncrl.runlog.time_ledger import TRAINER_STATES, WORKER_STATES
from data import TASKS
from scripts.lines import ROOT, run_command
from scripts.runs import (
    Run,
    check_are_given,
    evaluations,
    failures,
    load,
    names,
    progress,
    readable_summary,
)
from scripts.table import differing, options_of, show
from scripts.timeline import trace_of

ADVICE = re.compile("advice(?: on remote hosts)?: (.*)")
NUM_SAMPLES = 30  # groups with samples on a page, for all of its runs together
RECENT_S = 60  # a run whose last record is younger may still train
NUM_HOSTS = 8  # remote hosts that have curves
NOTHING_LEARNED = 0.95  # share of groups with equal rewards
FELL_SIGMAS = 4.0  # least fall of a reward, standard errors
HOST_COLUMNS = {
    "there, s": ("time", np.ptp),
    "responses": ("ticket", "count"),
    "tokens": ("tokens", "sum"),
    "lag": ("lag", "mean"),
    "MB sent": ("mb_sent", "sum"),
    "MB received": ("mb_received", "sum"),
    "mismatch, k3": ("mismatch/k3", "max"),
    "why it left": ("why", "last"),
}
"""Columns of the table of remote hosts: field of their events, and how to reduce it."""
_CHARTS = tomllib.loads(Path(__file__).with_name("report_page.toml").read_text(encoding="utf-8"))


def make_page(run: Run, timeline: dict, now: float) -> dict:
    """Return all that the page of a run shows; `now` is the Unix time."""
    drawn = charts(run.metrics)
    missing = [chart["title"] for chart in drawn if not chart["series"]]
    missing += ["Held-out accuracy"] * evaluations(run.metrics).empty
    tables = ledgers(run.metrics) | times(run.metrics, timeline["traceEvents"])
    hosts, events = [], host_events(run)
    if len(events):
        table = tables["What remote hosts did"] = host_table(events)
        hosts = list(table.index[:-1][:NUM_HOSTS])
        drawn += host_charts(events, hosts, timeline["otherData"]["start_unix_s"])
    return {
        "run": run,
        "title": f"{run.name}: {run.info['config']['algo']} on {run.info['config']['task']}",
        "facts": facts(run, timeline, now),
        "missing": missing,
        "tables": tables,
        "task": task_text(run.info["config"]["task"]),
        "samples": choose_samples(run.samples, NUM_SAMPLES),
        "data": {"charts": drawn, "names": hosts, "trace": timeline},
    }


def make_comparison(runs: list[Run]) -> dict:
    """Return all that the page of several runs shows. A run has one colour in all charts."""
    options = options_of([run.info["config"] for run in runs])
    facts, drawn, samples = {}, {}, []
    for name, run, values in zip(names(runs), runs, options.to_dict("records"), strict=True):
        parts = [f"{option} = {values[option]}" for option in differing(options)]
        steps = f"{run.metrics['step'].iloc[-1]} of {run.info['config']['steps']} steps"
        failed = [f"{what}: {text}" for what, text in failures(run).items()]
        facts[name] = ", ".join([*parts, steps, *failed])
        for chart in charts(run.metrics):
            for series in chart["series"]:
                title = f"{chart['title']}: {series['name'].replace('_', ' ')}"
                same = drawn.setdefault(title, chart | {"title": title, "series": []})
                same["series"].append(series | {"name": name})
        for sample in choose_samples(run.samples, NUM_SAMPLES // len(runs)):
            samples.append({"run": name, **sample})
    return {
        "run": None,
        "title": f"{len(runs)} runs",
        "facts": facts,
        "missing": [],
        "tables": {"Summary": summaries(runs)},
        "task": "",
        "samples": samples,
        "data": {"charts": [*drawn.values()], "names": [*facts], "trace": {"traceEvents": []}},
    }


def task_text(name: str) -> str:
    """Return the text on a task of data/; empty for user code."""
    kind = TASKS.get(name.partition(":")[0])
    return inspect.getmodule(kind).__doc__ if kind else ""


def render(page: dict) -> str:
    """Return the page as HTML that needs no other file. All that a run has written is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"readable": readable, "summary": readable_summary}
    data = gzip.compress(json.dumps(page["data"], allow_nan=False).encode(), mtime=0)
    states = {"trainer": TRAINER_STATES, "worker": WORKER_STATES}
    template = environment.get_template("report_page.html")
    return template.render(page, states=states, data=base64.b64encode(data).decode())


def readable(value: object) -> str:
    """Return a value for people: numbers have four digits, and what is missing is blank."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {readable(part)}" for name, part in value.items())
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return str(value)


def facts(run: Run, timeline: dict, now: float) -> dict[str, str]:
    """Return what was run, how it ended, how long it took, and how it differs from the default job."""
    info = run.info
    start, duration = timeline["otherData"].values()
    shown = {
        "command": shlex.join(info["command"]),
        "outcome": outcome(run, now - start - duration),
        "options": changed_options(info["config"]) or "all at their defaults",
        "commit": commit(info["git_commit"], info["git_diff"]),
    }
    if steps := [bar for bar in timeline["traceEvents"] if bar.get("cat") == "step"]:
        before, end = steps[0]["ts"] / 1e6, (steps[-1]["ts"] + steps[-1]["dur"]) / 1e6
        spans = [timedelta(seconds=round(span)) for span in (duration, before, duration - end)]
        shown["lasted"] = "{}, {} of it before the first step and {} after the last".format(*spans)
    certificate = run.path / "certificate.json"
    if certificate.exists():
        shown["certificate"] = json.loads(certificate.read_text(encoding="utf-8"))["verdict"]
    shown |= verdicts(run)
    if advice := extras.find("advice"):
        with suppress(ValueError):  # a run that is too short, for one
            shown["advice on speed"] = ADVICE.search(advice.advice_of(run))[1]
    return shown


def verdicts(run: Run) -> dict[str, str]:
    """Return the failures of a run, its warnings, and a verdict on each check that README names."""
    warnings = dict.fromkeys(
        record["text"] for record in run.records if record["event"] == "warning"
    )
    shown = {"warning": "; ".join(warnings)} if warnings else {}
    return failures(run) | shown | checks(run) | staleness(run) | learning(run.metrics)


def checks(run: Run) -> dict[str, str]:
    """Return a verdict on each metric of README's section «Is it staleness, or a bug?» that shows a bug."""
    device = "cuda" if run.info["hardware"]["gpus"] else "cpu"
    dtype = Config(dtype=run.info["config"].get("dtype", "auto")).dtype_on(device)
    faults = {
        "mismatch/abs_mean": "engine and trainer compute differently",
        "mismatch/decoded": "decoding uses old weights or an old cache",
        "ledger/groups_dropped_stale": "slow problems are discarded: use --stale-policy wait",
    }
    shown = {"mismatch/versions_behind": arrival(run)}
    for metric, fault in faults.items():
        is_mismatch = metric.startswith("mismatch/")
        limit = ALLOWED_MISMATCH[dtype] if is_mismatch else 0
        is_coarse = is_mismatch and dtype != "float32"
        healthy = "no gross fault" if is_coarse else "fine"
        largest = run.metrics.get(metric, pd.Series(dtype=float)).max()
        shown[metric] = "not measured"
        if pd.notna(largest):
            verdict = healthy if largest <= limit else fault
            shown[metric] = f"{verdict} (at most {largest:.3g}, limit {limit:g})"
    return shown


def staleness(run: Run) -> dict[str, str]:
    """Return the verdict on the bound on staleness; empty if there is no bound."""
    names = ("async_ratio", "publish_delay", "over_sampling", "stale_policy", "swarm.refresh_lag")
    options = run.info["config"]
    config = Config.from_dict({name: options[name] for name in names if name in options})
    if config.stale_policy == "gate" or "staleness/max" not in run.metrics:
        return {}
    oldest = run.metrics["staleness/max"].max()
    verdict = "fine"
    if oldest > config.max_staleness:
        verdict = "older than the bound: the loop trains on other groups, too"
    return {"staleness/max": f"{verdict} (at most {oldest:g}, limit {config.max_staleness})"}


def learning(metrics: pd.DataFrame) -> dict[str, str]:
    """Return verdicts on the rewards of the last tenth of the steps: whether groups teach, and whether they fell."""
    num_last = math.ceil(len(metrics) / 10)
    rewards = metrics["reward/mean"].rolling(num_last).mean()
    shown = {}
    equal = metrics.get("reward/zero_variance_groups", pd.Series(dtype=float)).tail(num_last).mean()
    if pd.notna(equal):
        verdict = "fine"
        if equal >= NOTHING_LEARNED:
            verdict = f"nothing is learned: a group's rewards are equal, {rewards.iloc[-1]:.3g} on average"
        steps = "step" if num_last == 1 else f"{num_last} steps"
        shown["reward/zero_variance_groups"] = (
            f"{verdict} ({equal:.2f} of the groups of the last {steps})"
        )
    best, last = rewards.max(), rewards.iloc[-1]
    # Standard error of the difference of two windows. The median of neighbouring steps' differences is 0.6745 standard
    # deviations. It does not count the fall itself as noise.
    error = metrics["reward/mean"].diff().abs().median() / 0.6745 / num_last**0.5
    if best - last > max(abs(best) / 2, FELL_SIGMAS * error):
        step = metrics["step"][rewards.idxmax()]
        place = f"step {step}" if num_last == 1 else f"steps {step - num_last + 1} to {step}"
        shown["reward/mean"] = (
            f"fell from {best:.3g}, the mean of {place}, to {last:.3g}: docs/telemetry.md#a-bad-curve"
        )
    return shown


def arrival(run: Run) -> str:
    """Return the verdict on the weights of the worst worker, and how many versions they are behind."""
    compared = run.events["lag"]
    if "late_sigmas" not in compared:  # older runs have other names
        return (
            "not measured: it compares versions from the third on, and only if their weights differ"
        )
    newest = compared.groupby(["node", "worker"]).last()
    worst = newest.loc[newest["late_sigmas"].idxmax()]
    verdict = "undecided: rounding hides the change of a version, so on a CPU try --dtype float32"
    if worst["late_sigmas"] > SURE:
        verdict = "weights arrive late, or never"
    elif newest["current_sigmas"].min() > SURE:
        verdict = "fine: weights arrive in time"
    return f"{verdict} ({worst['versions_behind']:.2g} ± {worst['versions_behind_error']:.1g} versions behind)"


def outcome(run: Run, age_s: float) -> str:
    """Return whether all steps were made, and the reason of an early end. The last record is `age_s` seconds old."""
    done, wanted = run.metrics["step"].iloc[-1], run.info["config"]["steps"]
    steps = f"{done} of {wanted} steps"
    ends, deaths, joined = (
        run.events[kind] for kind in ("run_ended", "worker_died", "machine_joined")
    )
    if done >= wanted:
        parts = [f"finished: all {wanted} steps"]
    elif len(ends):
        parts = [f"ended early: {steps}", ends["reason"].iloc[-1]]
    elif age_s < RECENT_S:
        parts = [f"still training, or ended just now: {steps}, last record {age_s:.0f} s ago"]
    else:
        parts = [f"ended early: {steps}", "worker_*.log, or what the run printed, may say why"]
    # A worker without an exit code was on a remote host that left.
    if "exit_code" in deaths:
        parts.append(f"worker deaths: {deaths['exit_code'].count()}")
    if len(joined):
        left = len(run.events["machine_left"])
        parts.append(f"remote hosts that joined: {len(joined)}, that left before the end: {left}")
    return "; ".join(parts)


def changed_options(config: dict) -> str:
    """Return the options that are not at the default of this version of asyncrl/config.py."""
    defaults = json.loads(json.dumps(Config().as_dict()))  # with lists for tuples, as in run.json
    changed = {k: v for k, v in config.items() if k not in defaults or v != defaults[k]}
    return ", ".join(f"{name} = {show(value)}" for name, value in changed.items())


def commit(sha: str | None, diff: str | None) -> str:
    """Return the commit, and whether it had been changed."""
    if sha is None:
        return "unknown: not run from a git checkout"
    return f"{sha}, {'with changes: git_diff of run.json' if diff else 'clean'}"


def charts(metrics: pd.DataFrame) -> list[dict]:
    """Return all charts over steps. One of what was not recorded has no series."""
    reached, by_step = progress(metrics), metrics.set_index("step")
    curves = {"reward": by_step["reward/mean"], "held-out accuracy": evaluations(metrics)}
    drawn = []
    for x, label in (("samples", "samples"), ("seconds", "seconds since the first step began")):
        moved = {
            name: curve.set_axis(curve.index.map(reached[x])) for name, curve in curves.items()
        }
        drawn.append(make_chart(f"Reward and held-out accuracy over {x}", label, moved))
    for title, pattern in _CHARTS["steps"].items():
        columns = by_step.filter(regex=f"^{pattern}$")
        columns.columns = columns.columns.str.extract(pattern, expand=False)
        if "_time/" in pattern:
            columns = columns.loc[:, columns.any()]  # states that occurred
        drawn.append(make_chart(title, "step", columns) | {"question": question_of(pattern)})
    return drawn


def question_of(pattern: str) -> str:
    """Return the question of docs/telemetry.md that metrics of this pattern answer, with its place, or ""."""
    page = ROOT / "docs/telemetry.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    for place, question, metrics in re.findall(
        r'^\| <a id="(.+?)"></a>(.+?) \| (.+?) \|', text, re.M
    ):
        if any(re.fullmatch(pattern, name) for name in re.findall("`(.+?)`", metrics)):
            return f"{question} docs/telemetry.md#{place}"
    return ""


def make_chart(title: str, x: str, curves: Mapping[str, pd.Series]) -> dict:
    """Return a chart of curves, each indexed by x, without the points and curves that have no value."""
    series = []
    for name, curve in curves.items():
        points = curve[curve.index.notna()].dropna().astype(float)
        if len(points):
            points.index = points.index.astype(float)
            series.append({"name": name, "points": [*points.items()]})
    return {"title": title, "x": x, "series": series}


def ledgers(metrics: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return where all groups and tokens of the run went, by the last line's ledger. A replay has no ledger."""
    tables = {}
    for unit, source in (("groups", "issued"), ("tokens", "generated")):
        ledger = metrics.iloc[-1].filter(like=f"ledger/{unit}_").dropna().astype(int)
        ledger.index = ledger.index.str.removeprefix(f"ledger/{unit}_")
        if len(ledger):
            parts = ledger.drop(source)
            parts.index = parts.index.str.replace("_", ": ", n=1).str.replace("_", " ")
            tables[f"Where the {unit} went"] = shares(parts, unit, source)
    return tables


def times(metrics: pd.DataFrame, bars: list[dict]) -> dict[str, pd.DataFrame]:
    """Return where the time of the trainer's steps went, and that of the workers from their starts to their ends."""
    tables = {}
    spent = metrics.filter(like="trainer_time/").mul(metrics["time/step_s"], axis=0).sum()
    spent.index = spent.index.str.removeprefix("trainer_time/")
    if spent.any():
        table = shares(spent[spent > 0], "seconds", "all steps")
        tables["Where the trainer's time went, rank 0"] = table
    states = [
        (bar["pid"], ": ".join([bar["name"], *bar["args"].values()]), bar["dur"] / 1e6)
        for bar in bars
        if bar.get("cat") in WORKER_STATES and "step" not in bar["args"]
    ]
    if states:
        by_worker = pd.DataFrame(states).pivot_table(2, 1, 0, "sum", fill_value=0.0)
        spent = by_worker.sum(axis=1).sort_values(ascending=False)
        table = shares(spent, "worker-seconds", "all workers")
        if len(by_worker.columns) > 1:
            each = (by_worker / by_worker.sum()).agg(["min", "max"], axis=1)
            table["of one worker"] = each.map("{:.1%}".format).agg(" … ".join, axis=1)
        tables["Where the workers' time went"] = table.fillna("")
    return tables


def shares(spent: pd.Series, unit: str, whole: str) -> pd.DataFrame:
    """Return a table with a row per part, its number and its share, and their sum."""
    total = spent.sum()
    spent = pd.concat([spent, pd.Series({whole: total})])
    form = "{}" if spent.dtype.kind == "i" else "{:.2f}"
    share = spent / (total or 1)
    return pd.DataFrame({unit: spent.map(form.format), "share": share.map("{:.1%}".format)})


def host_events(run: Run) -> pd.DataFrame:
    """Return the events of remote hosts and of their workers, each with its host's name. None if no host joined."""
    started = run.events["worker_started"]
    if "machine" not in started:
        return pd.DataFrame()
    workers = started.dropna(subset="machine")[["node", "worker", "machine"]]
    tables = [run.events[kind] for kind in ("machine_joined", "machine_left", "machine")]
    for kind in ("trajectory", "mismatch"):
        if len(run.events[kind]):
            tables.append(run.events[kind].merge(workers, on=["node", "worker"]))
    return pd.concat(tables, ignore_index=True)


def host_table(events: pd.DataFrame) -> pd.DataFrame:
    """Return a row per remote host, by how much it sampled, and one for all."""
    fields = [field for field, _ in HOST_COLUMNS.values()]
    events = events.reindex(columns=["machine", *fields])
    everything = events.assign(machine=f"all {events['machine'].nunique()}", why=None)
    tables = []
    for part in (events, everything):
        table = part.groupby("machine").agg(**HOST_COLUMNS)
        tables.append(table.sort_values("tokens", ascending=False))
    table = pd.concat(tables)
    table.insert(3, "tokens/s", table["tokens"] / table["there, s"].clip(lower=1e-3))
    return table.map(readable)


def host_charts(events: pd.DataFrame, hosts: list[str], start: float) -> list[dict]:
    """Return charts of these hosts over the time since `start`."""
    drawn = []
    events = events.assign(time=events["time"] - start).set_index(["machine", "time"])
    for field, title in _CHARTS["hosts"].items():
        if field in events:
            curves = {host: events.loc[host, field] for host in hosts}
            drawn.append(make_chart(f"{title}, by host", "seconds since the run's start", curves))
    return drawn


def choose_samples(samples: pd.DataFrame, num_groups: int) -> list[dict]:
    """Return the samples of groups that are spread evenly over the run, the first and the last among them."""
    if samples.empty:
        return []
    steps = samples["step"].unique()
    kept = np.linspace(0, len(steps) - 1, min(len(steps), max(1, num_groups))).round().astype(int)
    rows = samples[samples["step"].isin(steps[kept])].iterrows()
    return [row.dropna().to_dict() for _, row in rows]


def summaries(runs: list[Run]) -> pd.DataFrame:
    """Return what people look at first, a column per run."""
    columns = [pd.Series(readable_summary(run.metrics)) for run in runs]
    return pd.concat(columns, axis="columns", keys=names(runs))


def main(runs: Positional[list[Path]], trace: bool = False) -> None:
    """Print a summary, write the report, and say where it is.

    Args:
        runs: Directories of runs; report.html is written into it, or comparison.html into the first of several.
        trace: For one run also write trace.json, for https://ui.perfetto.dev.
    """
    check_are_given(runs)
    if trace and len(runs) > 1:
        raise ValueError("--trace is of one run; leave it out, or give one")
    for path in filter(os.path.isfile, runs):
        raise ValueError(
            f"{path} is a file; give the directory of a run, or tabulate it by table.py"
        )
    loaded = [load(path) for path in runs]
    print(summaries(loaded).to_string())
    if len(loaded) > 1:
        options = differing(options_of([run.info["config"] for run in loaded]))
        print(
            f"differ in: {', '.join(options) or 'nothing'}; scripts/ablate.py compares settings over seeds"
        )
    for name, run in zip(names(loaded), loaded, strict=True):
        for what, text in verdicts(run).items():
            print(f"{name}, {what}: {text}")
    folder = loaded[0].path
    if len(loaded) > 1:
        texts = {"comparison.html": render(make_comparison(loaded))}
    else:
        timeline = trace_of(loaded[0])
        texts = {"report.html": render(make_page(loaded[0], timeline, time.time()))}
        if trace:
            texts["trace.json"] = json.dumps(timeline)
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        print(f"{path.stem}: {path}")


if __name__ == "__main__":
    run_command(main)
