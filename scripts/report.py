"""Report on runs: `python scripts/report.py RUN [RUN ...] [--trace]`, RUN a directory with metrics.jsonl and run.json.

It prints a summary. Of one run it writes RUN/report.html, one page that needs nothing else: what was run, curves, a
timeline of trainer and workers, where groups, tokens and time went, and samples. --trace also writes RUN/trace.json,
which https://ui.perfetto.dev opens. Of several it writes comparison.html into the first: how they differ, every curve
with a line per run, and samples of each. A run that is still going, or was killed, is reported as far as it got.
"""

import argparse
import itertools
import json
import re
import shlex
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from asyncrl import extras
from asyncrl.config import Config
from asyncrl.runlog.time_ledger import TRAINER_STATES, WORKER_STATES
from scripts.runs import Run, evaluations, load, names, progress, readable_summary, rows
from scripts.table import differing_options, show
from scripts.timeline import STATE_COLORS, TRAJECTORY_FIELDS, Timeline, build_timeline, trace

NUM_SAMPLES = 30  # groups of which a page shows samples, those of all its runs together
STILL_GOING_S = 60  # a run whose last record is younger may be going on
COLORS = ("#2f6fb5", "#d9772b", "#3d9970")
MACHINE_COLORS = (*COLORS, "#8d6cc4", "#e3b505", "#e57373", "#6fb1e8", "#7a4a1e")
LAG_COLORS = {
    "0": "#6fb1e8",
    "1": "#3f83cc",
    "2": "#4457b0",
    "3-4": "#7a3fa5",
    "5-8": "#a8266f",
    "9+": "#8c1030",
}
"""Of the lag buckets of asyncrl/trainer/lag_stats.py, which needs torch; fresh to stale."""
_PAGE = tomllib.loads(Path(__file__).with_name("report_page.toml").read_text(encoding="utf-8"))
CURVES, MACHINE_CURVES = _PAGE["charts"], _PAGE["machine_charts"]
CURVES |= {
    "Clip fraction by lag, steps": {f"loss/clipped/lag_{lag}": f"lag {lag}" for lag in LAG_COLORS},
    "Effective sample size by lag, steps": {
        f"loss/ess/lag_{lag}": f"lag {lag}" for lag in LAG_COLORS
    },
    "Trainer's time, share of each step": {
        f"trainer_time/{state}": state for state in TRAINER_STATES
    },
    "Workers' time, share, all workers together": {
        f"worker_time/{state}": state for state in WORKER_STATES
    },
}
"""Charts over steps: title, metrics and what to call them."""
# others are named parts of it
WHOLE_REWARD = ("reward/mean", "reward/std", "reward/zero_variance_groups")


def make_page(run: Run, timeline: Timeline, now: float) -> dict:
    """All that the page of a run shows, as plain text and numbers; `now` is the Unix time."""
    drawn, missing = charts(run.metrics)
    machines = of_machines(run)
    return {
        "is_one": True,
        "title": f"{run.name}: {run.info['config']['algo']} on {run.info['config']['task']}",
        "facts": facts(run, timeline, now),
        "numbers": readable_summary(run.metrics),
        "charts": drawn + machine_charts(machines, timeline.start),
        "missing": missing if run.events else [*missing, "Timeline"],
        "timeline": timeline if run.events else None,
        "tables": [
            *ledgers(run.metrics),
            *trainer_time(run.metrics),
            *workers_time(timeline),
            *machine_table(machines),
        ],
        "samples": choose_samples(run.samples, NUM_SAMPLES),
    }


def make_comparison(runs: list[Run]) -> dict:
    """All that the page of several runs shows; a run has one colour in all charts."""
    options, of_runs = differing_options(runs), dict(zip(names(runs), runs, strict=True))
    facts, summaries, drawn, samples = {}, {}, {}, []
    for (name, run), color in zip(of_runs.items(), itertools.cycle(MACHINE_COLORS)):
        config, made = (
            run.info["config"],
            f"{run.metrics['step'].iloc[-1]} of {run.info['config']['steps']} steps",
        )
        facts[name] = ", ".join(
            [*(f"{option} = {show(config.get(option))}" for option in options), made]
        )
        summaries[name] = readable_summary(run.metrics)
        for title, x, series in single_curves(run.metrics):
            chart = drawn.setdefault(title, {"title": title, "x": x, "series": []})
            chart["series"].append(series | {"name": name, "color": color})
        samples += [
            {"run": name, **sample}
            for sample in choose_samples(run.samples, NUM_SAMPLES // len(runs))
        ]
    labels = dict.fromkeys(label for summary in summaries.values() for label in summary)
    cells = [
        [label, *(summary.get(label, "–") for summary in summaries.values())] for label in labels
    ]
    table = {
        "title": "What people look at first",
        "headings": ["", *of_runs],
        "rows": cells,
        "meanings": {},
    }
    page = {
        "is_one": False,
        "title": f"{len(runs)} runs",
        "facts": facts,
        "numbers": {},
        "missing": [],
    }
    return page | {
        "charts": [*drawn.values()],
        "timeline": None,
        "tables": [table],
        "samples": samples,
    }


def render(page: dict) -> str:
    """The page as HTML that needs nothing but itself; all that a run has written is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    timeline = page["timeline"] or Timeline(0.0, 0.0, [])
    shown = {"duration": timeline.duration, "fields": TRAJECTORY_FIELDS, "colors": STATE_COLORS}
    data = {
        "charts": page["charts"],
        "timeline": shown | {"lanes": [lane.data() for lane in timeline.lanes]},
    }
    return environment.get_template("report_page.html").render(page=page, data=data)


def facts(run: Run, timeline: Timeline, now: float) -> dict[str, str]:
    """What was run, on what, how it differs from the default job, and how it ended."""
    info, hardware = run.info, run.info["hardware"]
    gpus = (
        ", ".join(f"{count} × {name}" for name, count in Counter(hardware["gpus"]).items())
        or "no GPU"
    )
    ranks = f"{info['world_size']} trainer rank{'s' * (info['world_size'] > 1)}"
    steps = [bar for bar in timeline.lanes[0].bars if bar.kind == "step"]
    before, last = (steps[0].start, steps[-1].end) if steps else (0.0, timeline.duration)
    times = [
        timedelta(seconds=round(s)) for s in (timeline.duration, before, timeline.duration - last)
    ]
    lasted = ", lasted {}, {} of it before the first step and {} after the last".format(*times)
    shown = {
        "command": shlex.join(info["command"]),
        "outcome": outcome(run, timeline, now),
        "started": info["started_at"] + (lasted if run.events else ""),
        "options": changed_options(info["config"]) or "all at their defaults",
        "commit": commit(info["git_commit"], info["git_diff"]),
        "hardware": f"{hardware['cpu_cores']} CPU cores ({hardware['cpu']}), {gpus}; {ranks}",
        "packages": ", ".join(
            [*map(" ".join, info["packages"].items()), f"Python {info['python']}"]
        ),
    }
    advice = extras.find("advice")
    if advice is not None:
        with suppress(ValueError):  # a run that is too short, for one
            shown["advice"] = re.search("advice(?: on machines)?: (.*)", advice.advice_of(run))[1]
    for event in rows(run.events["warning"]):
        shown["warning"] = event["text"]
    if run.cut:
        shown["left out"] = f"the last line of {', '.join(run.cut)}, which is half written"
    return shown


def outcome(run: Run, timeline: Timeline, now: float) -> str:
    """Whether all steps were made, and what stopped the run if it says so."""
    done, wanted = run.metrics["step"].iloc[-1], run.info["config"]["steps"]
    # else its machine has left
    deaths = sum("exit_code" in event for event in rows(run.events["worker_died"]))
    suffix = f"; worker deaths: {deaths}" if deaths else ""
    if joined := len(run.events["machine_joined"]):
        suffix += f"; machines that joined: {joined}, that left before the end: {len(run.events['machine_left'])}"
    if done >= wanted:
        return f"finished: all {wanted} steps{suffix}"
    for event in rows(run.events["run_ended"]):
        return f"ended early: {done} of {wanted} steps; {event['reason']}{suffix}"
    age = now - timeline.start - timeline.duration
    if age < STILL_GOING_S:
        return f"still going, or ended just now: {done} of {wanted} steps, last record {age:.0f} s ago{suffix}"
    return f"ended early: {done} of {wanted} steps; worker_*.log, or what the run printed, may say why{suffix}"


def changed_options(config: dict) -> str:
    """The options that are not at the default of this version of asyncrl/config.py; JSON has lists for its tuples."""
    defaults = {
        name: list(v) if isinstance(v, tuple) else v for name, v in Config().as_dict().items()
    }
    changed = {
        name: value
        for name, value in config.items()
        if name not in defaults or value != defaults[name]
    }
    return ", ".join(f"{name} = {show(value)}" for name, value in changed.items())


def commit(sha: str | None, diff: str | None) -> str:
    """The commit, and what of it had been changed."""
    if sha is None:
        return "unknown: not run from a git checkout"
    files = re.findall(r"^diff --git a/.* b/(.*)$", diff or "", re.MULTILINE)
    added, removed = (
        len(re.findall(rf"^[{s}](?![{s}]{{2}})", diff or "", re.MULTILINE)) for s in "+-"
    )
    return f"{sha}, " + (
        f"dirty: +{added} −{removed} lines in {', '.join(files)} (see run.json)"
        if diff
        else "clean"
    )


def charts(metrics: pd.DataFrame) -> tuple[list[dict], list[str]]:
    """The charts that have data, and the names of what is not there to be drawn."""
    reached, accuracy = progress(metrics), evaluations(metrics)
    accuracy = accuracy[accuracy.index.isin(reached.index)]
    colors, possible = STATE_COLORS | {f"lag {lag}": color for lag, color in LAG_COLORS.items()}, []
    for x, label in (("samples", "samples"), ("seconds", "seconds since the first step began")):
        rewards = curve("reward", COLORS[0], reached[x][metrics["step"]], metrics["reward/mean"])
        accuracies = curve(
            "held-out accuracy", COLORS[1], reached[x][accuracy.index], accuracy, marked=True
        )
        title = f"Reward and held-out accuracy over {x.replace('seconds', 'time')}"
        possible.append({"title": title, "x": label, "series": [rewards, accuracies]})
    parts = [name for name in metrics if name.startswith("reward/") and name not in WHOLE_REWARD]
    of_parts = (
        {"Parts of the reward, mean": {name: name.removeprefix("reward/") for name in parts}}
        if parts
        else {}
    )
    for title, labels in (of_parts | CURVES).items():
        there = [(name, label) for name, label in labels.items() if name in metrics]
        series = [
            curve(
                label,
                colors.get(label, MACHINE_COLORS[index % len(MACHINE_COLORS)]),
                metrics["step"],
                metrics[name],
            )
            for index, (name, label) in enumerate(there)
            if label not in STATE_COLORS or metrics[name].any()
        ]
        possible.append({"title": title, "x": "step", "series": series})
    for chart in possible:
        chart["series"] = [series for series in chart["series"] if series["points"]]
    missing = [chart["title"] for chart in possible if not chart["series"]]
    return [chart for chart in possible if chart["series"]], [
        "Held-out accuracy"
    ] * accuracy.empty + missing


def single_curves(metrics: pd.DataFrame) -> Iterator[tuple[str, str, dict]]:
    """Every curve of a run by a title of its own, with the name of its x."""
    for chart in charts(metrics)[0]:
        # those over samples and over time have two
        is_alone = len(CURVES.get(chart["title"], "..")) == 1
        for series in chart["series"]:
            yield (
                chart["title"] if is_alone else f"{chart['title']}: {series['name']}",
                chart["x"],
                series,
            )


def curve(name: str, color: str, x: pd.Series, y: pd.Series, marked: bool = False) -> dict:
    """One curve of a chart; `marked` draws each point, as for rare measurements."""
    pairs = zip(x.to_numpy(float).tolist(), y.to_numpy(float).tolist(), strict=True)
    return {
        "name": name,
        "color": color,
        "marked": marked,
        "points": [pair for pair in pairs if pair[1] == pair[1]],
    }


def ledgers(metrics: pd.DataFrame) -> list[dict]:
    """Where all groups and tokens of the run went, from the last line's ledger; a replay samples none, and has none."""
    tables = []
    for unit, source in (("groups", "issued"), ("tokens", "generated")):
        ledger = metrics.iloc[-1].filter(like=f"ledger/{unit}_").dropna().astype(int)
        ledger.index = (
            ledger.index.str.removeprefix(f"ledger/{unit}_")
            .str.replace("_", ": ", n=1)
            .str.replace("_", " ")
        )
        if len(ledger):
            tables.append(shares(f"Where the {unit} went", unit, ledger.drop(source), source))
    return tables


def trainer_time(metrics: pd.DataFrame) -> list[dict]:
    """Where the time of the trainer's steps went; the states sum to all of it."""
    columns = {
        f"trainer_time/{state}": state
        for state in TRAINER_STATES
        if f"trainer_time/{state}" in metrics
    }
    spent = metrics[[*columns]].rename(columns=columns).mul(metrics["time/step_s"], axis=0).sum()
    spent = spent[spent > 0]
    title = "Where the trainer's time went, rank 0"
    return [] if spent.empty else [shares(title, "seconds", spent, "all steps", TRAINER_STATES)]


def workers_time(timeline: Timeline) -> list[dict]:
    """Where the time of the workers went, from their starts to their ends; the states sum to all of it."""
    spent = pd.DataFrame(
        (
            lane.name,
            ": ".join([bar.kind, *filter(None, [bar.details.get("why")])]),
            bar.end - bar.start,
        )
        for lane in timeline.lanes[2:]
        for bar in lane.bars
        if bar.kind in WORKER_STATES
    )
    if spent.empty:
        return []
    of_worker = spent.pivot_table(values=2, index=1, columns=0, aggfunc="sum", fill_value=0.0)
    together = of_worker.sum(axis=1).sort_values(ascending=False)
    each = (of_worker / of_worker.sum()).agg(["min", "max"], axis=1)
    ranges = (
        {name: f"{low:.1%} … {high:.1%}" for name, low, high in each.itertuples()}
        if len(of_worker.T) > 1
        else {}
    )
    return [
        shares(
            "Where the workers' time went",
            "worker-seconds",
            together,
            "all workers",
            WORKER_STATES,
            ranges,
        )
    ]


def of_machines(run: Run) -> dict[str, dict[str, list[dict]]]:
    """The events of each machine that joined, and of its engines, by kind; those that sampled most first."""
    of_workers, found = {}, defaultdict(lambda: defaultdict(list))
    for kind in (
        "machine_joined",
        "machine_left",
        "machine",
        "worker_started",
        "trajectory",
        "mismatch",
    ):
        for event in rows(run.events[kind]):
            worker = event["node"], event.get("worker")
            if kind == "worker_started":
                of_workers[worker] = event.get("machine")
            if name := event.get("machine", of_workers.get(worker)):
                found[name][kind].append(event)
    return dict(
        sorted(
            found.items(), key=lambda item: -sum(event["tokens"] for event in item[1]["trajectory"])
        )
    )


def machine_charts(machines: dict, start: float) -> list[dict]:
    """Charts of the machines that sampled most, as many as there are colours, over the time since `start`."""
    drawn = []
    for name, title in MACHINE_CURVES.items():
        chart = {
            "title": f"{title}, by machine",
            "x": "seconds since the run's start",
            "series": [],
        }
        for (machine, events), color in zip(machines.items(), MACHINE_COLORS, strict=False):
            told = events["machine"] + events["mismatch"]
            points = [(event["time"] - start, event[name]) for event in told if name in event]
            chart["series"] += [
                {"name": machine, "color": color, "marked": False, "points": points}
            ] * bool(points)
        drawn += [chart] * bool(chart["series"])
    return drawn


def machine_table(machines: dict) -> list[dict]:
    """A row for each machine, those that sampled most first, and one for all; none if none joined."""
    of_all = {
        kind: [e for one in machines.values() for e in one[kind]]
        for one in machines.values()
        for kind in one
    }
    named = [*machines.items(), (f"all {len(machines)}", defaultdict(list, of_all))]
    shown = [machine_row(name, events) for name, events in named if events]
    title, cells = "What machines did that joined", [list(row.values()) for row in shown]
    return [
        {"title": title, "headings": [*row], "rows": cells, "meanings": {}} for row in shown[:1]
    ]


def machine_row(name: str, events: dict[str, list[dict]]) -> dict[str, str]:
    """What one machine, or all, did: heading and cell."""
    left, told, sampled = events["machine_left"], events["machine"], events["trajectory"]
    times, tokens = (
        [e["time"] for of_kind in events.values() for e in of_kind],
        sum(e["tokens"] for e in sampled),
    )
    lags, there_s = [event["lag"] for event in told if "lag" in event], max(times) - min(times)
    row = {
        "machine": name,
        "there, s": f"{there_s:.1f}",
        "responses": f"{len(sampled)}",
        "tokens": f"{tokens}",
    }
    row |= {
        "tokens/s": f"{tokens / max(1e-3, there_s):.1f}",
        "lag": f"{fmean(lags):.2f}" if lags else "",
    }
    row |= {
        f"MB {way}": f"{sum(event[f'mb_{way}'] for event in told):.1f}"
        for way in ("sent", "received")
    }
    row["mismatch, k3"] = (
        f"{max((event['mismatch/k3'] for event in events['mismatch']), default=float('nan')):.2g}"
    )
    return row | {
        "why it left": left[0]["why"] if left and len(events["machine_joined"]) == 1 else ""
    }


def shares(title: str, unit: str, spent: pd.Series, whole: str, meanings=None, ranges=None) -> dict:
    """A table: a row per name with its number, share and perhaps range; their sum; what the names mean."""
    total, form = spent.sum(), "{}" if spent.dtype.kind == "i" else "{:.2f}"
    rows = [
        [name, form.format(n), f"{n / (total or 1):.1%}"]
        for name, n in [*spent.items(), (whole, total)]
    ]
    if ranges:
        rows = [[*row, ranges.get(row[0], "")] for row in rows]
    headings = ["state" if meanings else "", unit, "share", *["of one worker"] * bool(ranges)]
    there = {name.partition(":")[0] for name in spent.index}
    meant = {name: meaning for name, meaning in (meanings or {}).items() if name in there}
    return {"title": title, "headings": headings, "rows": rows, "meanings": meant}


def choose_samples(samples: pd.DataFrame, num_groups: int) -> list[dict]:
    """Best and worst recorded member of groups spread over the run, first and last among them; one if all are alike."""
    groups: dict[tuple, list[dict]] = {}
    for sample in rows(samples):
        sample = {"prompt": "", "response": "", **sample}
        if "answer" in sample:
            sample["right answer"] = sample.pop("answer")
        groups.setdefault((sample["step"], sample.get("group")), []).append(sample)
    count, chosen = min(len(groups), max(1, num_groups)), []
    kept = [
        list(groups.values())[round(i * (len(groups) - 1) / max(1, count - 1))]
        for i in range(count)
    ]
    for members in kept:
        worst, *_, best = ranked = sorted(
            [members[0], *members], key=lambda sample: sample.get("reward", -1e9)
        )
        if best.get("reward") == worst.get("reward"):
            chosen.append(ranked[0])
        else:
            chosen += [
                {"of its group": word, **one} for word, one in (("best", best), ("worst", worst))
            ]
    return chosen


def write_report(run: Run, with_trace: bool) -> list[Path]:
    """Write what was asked for into the run's directory. Returns the files."""
    timeline = build_timeline(run)
    texts = {"report.html": render(make_page(run, timeline, time.time()))}
    if with_trace:
        texts["trace.json"] = json.dumps(trace(timeline))
    for name, text in texts.items():
        (run.path / name).write_text(text, encoding="utf-8")
    return [run.path / name for name in texts]


def write_comparison(runs: list[Run]) -> Path:
    """Write the page of several runs into the first one's directory. Returns its path."""
    file = runs[0].path / "comparison.html"
    file.write_text(render(make_comparison(runs)), encoding="utf-8")
    return file


def main() -> None:
    """Read the command line, write the report, print a summary, and say where the report is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = "directory of a run; report.html is written into it, or comparison.html into the first of several"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=where)
    text = "of one run, also write trace.json, for https://ui.perfetto.dev"
    parser.add_argument("--trace", action="store_true", help=text)
    arguments = parser.parse_args()
    if arguments.trace and len(arguments.runs) > 1:
        parser.error("--trace is of one run; leave it out, or give one")
    try:
        runs = [load(path) for path in arguments.runs]
        written = (
            [write_comparison(runs)] if len(runs) > 1 else write_report(runs[0], arguments.trace)
        )
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    summaries = {
        name: readable_summary(run.metrics) for name, run in zip(names(runs), runs, strict=True)
    }
    print(pd.DataFrame(summaries).to_string(na_rep="-"))
    print(*(f"{path.stem}: {path}" for path in written), sep="\n")


if __name__ == "__main__":
    main()
