"""The report of a run: what its page and its trace say of a recorded run, and that a browser draws it.

The run is one of results/. report.toml has a worker of another node that dies, and two remote hosts.
"""

import base64
import gzip
import html
import json
import re
import shutil
import tomllib
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from programs import ROOT, run_script
from user_files import write_jsonl

from asyncrl import extras
from asyncrl.config import Config
from scripts import report
from scripts.lines import read
from scripts.runs import load
from scripts.timeline import trace_of

RECORDED = ROOT / "results/smollm2/one_digit-s0"
METRICS = read(RECORDED / "metrics.jsonl")
EVENTS = read(RECORDED / "events.jsonl")
STARTED = datetime.fromisoformat(load(RECORDED).info["started_at"]).timestamp()
GOLDEN = tomllib.loads(Path(__file__).with_name("report.toml").read_text())
RECORDED_LANES = ("trainer", "worker 0")
HOSTILE = (
    "</script><script>alert('a')</script><img src=x onerror=alert(1)> & \"quoted\" {{ 7 * 7 }}"
)


def events_of(name):
    """The events of report.toml, in Unix time."""
    events = [json.loads(line) for line in GOLDEN[name].strip().splitlines()]
    for event in events:
        for key in {"time", "started_at", "ended_at", "until"} & event.keys():
            event[key] += STARTED
        for change in event.get("changes", ()):
            change[0] += STARTED
    return events


@pytest.fixture
def run(tmp_path):
    path = shutil.copytree(RECORDED, tmp_path / "my run")
    write_jsonl(path / "events.jsonl", EVENTS + events_of("hosts"))
    write_jsonl(path / "node_1" / "events.jsonl", events_of("dying_worker"))
    hostile = {"step": 39, "response": HOSTILE, "reward": 0.1 + 0.2}
    write_jsonl(path / "samples.jsonl", [*read(path / "samples.jsonl"), hostile])
    return path


def page_of(run, now=STARTED + 10_000):
    """What the page of a run shows. Every cell of its tables stands in the HTML in its order."""
    loaded = load(run)
    page = report.make_page(loaded, trace_of(loaded), now)
    shown = [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", report.render(page))]
    rows = [row for table in page["tables"].values() for row in table.itertuples()]
    assert shown == [str(value) for row in rows for value in row]
    return page


def lanes_of(run):
    """The bars and moments of each lane, times in seconds."""
    lanes = {}
    for bar in trace_of(load(run))["traceEvents"]:
        if bar["name"] == "process_name":
            lanes[bar["pid"]] = (bar["args"]["name"], [])
        elif bar["ph"] != "M":
            start, end = bar["ts"] / 1e6, (bar["ts"] + bar.get("dur", 0)) / 1e6
            lanes[bar["pid"]][1].append(bar | {"start": start, "end": end})
    return dict(lanes.values())


# Page


def as_text(page, lanes):
    """What a page shows, with the steps of its samples, and of the recorded run's bars the sums."""
    lines = [f"{name}: {text}" for name, text in page["facts"].items()]
    lines.append("not recorded: " + "; ".join(page["missing"]))
    for title, table in page["tables"].items():
        lines += ["", title, table.to_csv(sep="|").strip()]
    for chart in page["data"]["charts"]:
        lines += ["", f"{chart['title']}, by {chart['x']}"]
        for series in chart["series"]:
            points = series["points"]
            total = sum(y for _, y in points)
            ends = f"from {points[0]} to {points[-1]}"
            lines.append(f"{series['name']}: {len(points)} {ends}, {total:.6g} in all")
    lines += ["", f"samples of steps {[sample['step'] for sample in page['samples']]}"]
    for name, bars in lanes.items():
        sums = [f"{sum(bar[key] for bar in bars):.3f}" for key in ("tid", "start", "end")]
        lines += ["", f"{name}: {len(bars)} bars; sums of rows, starts and ends: {sums}"]
        for bar in bars if name not in RECORDED_LANES else ():
            span = f"{bar['start']:.3f} to {bar['end']:.3f}"
            lines.append(f"{bar['cat']} {bar['name']}: {span} {bar['args']}")
    return "\n".join(lines) + "\n"


def test_the_page_shows_what_was_run_curves_ledgers_times_hosts_and_deaths(run, monkeypatch):
    info = json.loads((run / "run.json").read_text())
    info["git_diff"] = "diff --git a/x.py b/y.py\n--- a/x.py\n+++ b/y.py\n-one\n+two\n+three"
    config = Config(algo="tis", steps=38, seed=7, dtype="bfloat16").as_dict()
    info["config"] = json.loads(json.dumps(config)) | {"gone": 1}
    (run / "run.json").write_text(json.dumps(info))
    assert page_of(run)["facts"].pop("advice on speed")
    monkeypatch.setitem(extras.MODULES, "advice", "extras.nowhere.advice")
    text = as_text(page_of(run), lanes_of(run))
    assert text == Path(__file__).with_name("report.txt").read_text()


def lag_event(worker, late_sigmas, current_sigmas):
    return {"event": "lag", "time": STARTED + 20, "worker": worker, "version": 3, "versions_behind": late_sigmas / 100,
            "versions_behind_error": 0.01, "late_sigmas": late_sigmas, "current_sigmas": current_sigmas}  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "value", "verdict"),
    [
        ("mismatch/versions_behind", [(0, -20.0, 40.0)], "fine: weights arrive in time (-0.2 ± 0.01 versions behind)"),
        ("mismatch/versions_behind", [(0, 9.0, -1.0), (0, -20.0, 40.0)], "fine: weights"),
        ("mismatch/versions_behind", [(0, -20.0, 40.0), (1, 6.1, -7.0)],
         "weights arrive late, or never (0.061 ± 0.01 versions behind)"),
        ("mismatch/versions_behind", [(0, -20.0, 40.0), (1, -2.0, 5.9)], "undecided: rounding hides"),
        ("mismatch/versions_behind", [], "not measured"),
        ("mismatch/abs_mean", 0.1499, "no gross fault (at most 0.15, limit 0.15)"),
        ("mismatch/abs_mean", 0.16, "engine and trainer compute differently (at most 0.16, limit 0.15)"),
        ("mismatch/decoded", 0.16, "decoding uses old weights or an old cache (at most 0.16, limit 0.15)"),
        ("ledger/groups_dropped_stale", 1, "slow problems are discarded: use --stale-policy wait (at most 1, limit 0)"),
        ("reward/zero_variance_groups", 1.0, "nothing is learned: a group's rewards are equal, "),
        ("reward/zero_variance_groups", 0.94, "fine (0.94 of the groups of the last "),
    ],
)  # fmt: skip
def test_the_checks_of_the_readme_are_printed_with_value_limit_and_verdict(
    metric, value, verdict, run, monkeypatch, capsys
):
    if metric == "mismatch/versions_behind":
        old_names = {"event": "lag", "time": STARTED, "worker": 0, "version": 2, "behind": 9.0}
        lags = [lag_event(*sigmas) for sigmas in value] or [old_names]
        write_jsonl(run / "events.jsonl", EVENTS + lags)
    else:
        write_jsonl(run / "metrics.jsonl", [line | {metric: value} for line in METRICS])
    run_script(monkeypatch, "report.py", run)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if metric in line]
    assert line.startswith(f"my run, {metric}: ") and verdict in line
    assert f"`{metric}`" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("rewards", "equal", "verdicts"),
    [
        ([0.1, 0.4, 0.5], [0.2, 0.2, 0.2], ["fine (0.20 of the groups of the last step)"]),
        ([0.1] * 5 + [0.9] * 15, [0.2] * 18 + [0.91, 1.0],
         ["nothing is learned: a group's rewards are equal, 0.9 on average (0.96 of the groups of the last 2 steps)"]),
        ([0.2, 0.4] + [0.0] * 18, [0.1] * 2 + [1.0] * 18,
         ["nothing is learned: a group's rewards are equal, 0 on average (1.00 of the groups of the last 2 steps)",
          "fell from 0.3, the mean of steps 1 to 2, to 0: docs/telemetry.md#a-bad-curve"]),
        ([-1.0, -0.5, -0.9], [0.2] * 3, ["fine (0.20 of the groups of the last step)"]),
        ([-0.2] * 10 + [-1.0] * 10, [0.2] * 20, ["fine (0.20 of the groups of the last 2 steps)",
         "fell from -0.2, the mean of steps 1 to 2, to -1: docs/telemetry.md#a-bad-curve"]),
        ([0.5, *[0.1, 0.2] * 20], [0.2] * 41, ["fine (0.20 of the groups of the last 5 steps)"]),
        ([0.1, 0.3, *[0.2, 0.05] * 9], [0.2] * 20, ["fine (0.20 of the groups of the last 2 steps)"]),
    ],
)  # fmt: skip
def test_a_run_whose_groups_teach_nothing_or_whose_reward_fell_is_told_so(rewards, equal, verdicts):
    columns = {"step": range(1, len(rewards) + 1), "reward/mean": rewards}
    metrics = pd.DataFrame(columns | {"reward/zero_variance_groups": equal})
    assert [*report.learning(metrics).values()] == verdicts


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({"async_ratio": 0.5, "publish_delay": 2}, "fine (at most 3, limit 3)"),
        (
            {"async_ratio": 2.0},
            "older than the bound: the loop trains on other groups, too (at most 3, limit 2)",
        ),
        ({"async_ratio": 2.0, "stale_policy": "gate"}, None),
    ],
)
def test_the_bound_on_staleness_is_compared_with_the_oldest_token(options, verdict):
    metrics = pd.DataFrame({"staleness/max": [0, 3, 1]})
    run = SimpleNamespace(info={"config": options}, metrics=metrics)
    assert report.staleness(run).get("staleness/max") == verdict


def test_a_run_that_was_killed_or_still_trains_is_reported_as_far_as_it_got(run):
    write_jsonl(run / "metrics.jsonl", METRICS[:2])
    (run / "events.jsonl").write_text('{"event": "traj')
    outcomes = {
        7: "still training, or ended just now: 2 of 38 steps, last record 7 s ago",
        600: "ended early: 2 of 38 steps; worker_",
    }
    for age_s, outcome in outcomes.items():
        facts = page_of(run, STARTED + 25.5 + age_s)["facts"]
        assert facts["outcome"].startswith(outcome) and "advice on speed" not in facts


def test_all_that_a_run_has_written_is_text(run):
    page = page_of(run)
    text = report.render(page)
    shown = [html.unescape(response) for response in re.findall("(?s)<pre>(.*?)</pre>", text)]
    assert HOSTILE in shown and shown == [sample["response"] for sample in page["samples"]]
    assert "<b>reward</b> 0.3<" in text, "and not 0.30000000000000004"
    assert text.count("</script>") == 2 and "<img" not in text and "{%" not in text
    assert "default-src 'none'" in text
    assert set(re.findall(' (?:src|href)="(.*?)"', text)) == {"data:,"}
    data = re.search('id="data" type="text/plain">(.*?)<', text)[1]
    assert "it </script> broke" in gzip.decompress(base64.b64decode(data)).decode()


def test_a_run_of_one_step_and_nothing_else_has_a_page(run):
    optional = ("ledger", "trainer_time", "eval")
    bare = {name: value for name, value in METRICS[0].items() if not name.startswith(optional)}
    write_jsonl(run / "metrics.jsonl", [bare])
    for name in ("events.jsonl", "events.jsonl.gz", "samples.jsonl", "node_1/events.jsonl"):
        (run / name).unlink()
    page = page_of(run)
    assert page["tables"] == {} and page["samples"] == []
    assert {"Held-out accuracy", "Trainer's time, share of each step"} <= {*page["missing"]}


def test_the_command_writes_the_page_of_a_run_or_of_several_with_a_line_each_in_every_chart(
    run, monkeypatch, capsys
):
    other = ROOT / "results/smollm2/one_digit-s1"
    run_script(monkeypatch, "report.py", run, "--trace")
    assert capsys.readouterr().out.endswith(f"report: {run}/report.html\ntrace: {run}/trace.json\n")
    run_script(monkeypatch, "report.py", run, other)
    assert capsys.readouterr().out.endswith(f"comparison: {run}/comparison.html\n")
    assert json.loads((run / "trace.json").read_text()) == trace_of(load(run))
    assert "<h2>Timeline</h2>" in (run / "report.html").read_text()
    page = report.make_comparison([load(run), load(other)])
    assert (run / "comparison.html").read_text() == report.render(page)
    assert as_text(page, {}) == Path(__file__).with_name("comparison.txt").read_text()
    assert {sample["run"] for sample in page["samples"]} == {"my run", "one_digit-s1"}


# In a browser


@pytest.mark.parametrize(
    ("scheme", "widths"),
    [("light", (1280, 400)), pytest.param("dark", (400, 1280), marks=pytest.mark.slow)],
)
def test_a_browser_draws_the_page_and_names_what_is_under_the_pointer(run, browser, scheme, widths):
    page = page_of(run)
    file = run / "page.html"
    file.write_text(report.render(page))
    width, other_width = widths
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems = []
    view.on("console", lambda message: problems.append(message.text))
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.goto(file.as_uri())
    view.wait_for_selector("#key span")
    background = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(245, 246, 249)") == (scheme == "light")
    num_curves = sum(len(chart["series"]) for chart in page["data"]["charts"])
    assert view.locator("#charts polyline").count() == num_curves
    canvas = view.locator("#timeline")
    tips = []
    for x in range(100, width - 100, width // 50):
        canvas.hover(position={"x": x, "y": 158})
        tips.append(view.locator("#tip").inner_text())
    assert any(tip.startswith("response\nticket: ") for tip in tips), tips
    # The page draws at the next frame, however late a busy machine has it.
    pixels = "document.querySelector('#timeline').toDataURL()"
    whole = view.evaluate(pixels)
    view.mouse.wheel(0, -600)
    view.wait_for_function(f"whole => {pixels} !== whole", arg=whole)  # the wheel zooms
    view.get_by_role("button", name="whole run").click()
    view.wait_for_function(f"whole => {pixels} === whole", arg=whole)
    view.fill("#least", "0.5")
    good = sum(sample["reward"] >= 0.5 for sample in page["samples"])
    assert view.locator("#count").inner_text() == f"{good} of {len(page['samples'])}"
    assert view.locator(".sample:visible").count() == good
    # Nothing is cut off at either width.
    assert view.evaluate("document.documentElement.scrollWidth") == width
    view.set_viewport_size({"width": other_width, "height": 900})
    view.wait_for_function(f"whole => {pixels} !== whole", arg=whole)
    assert view.evaluate("document.documentElement.scrollWidth") == other_width
    assert problems == []
    view.close()
