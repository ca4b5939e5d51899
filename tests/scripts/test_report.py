"""The report of a run: what its page and its trace say of a recorded run, and that a browser draws it.

The run is one of results/. A worker of another node that dies, and two remote hosts, are written here.
"""

import base64
import gzip
import html
import itertools
import json
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from asyncrl import extras
from asyncrl.config import Config
from scripts import report
from scripts.lines import read
from scripts.runs import load
from scripts.timeline import trace

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results/smollm2/one_digit-s0"
METRICS = read(RECORDED / "metrics.jsonl")
EVENTS = read(RECORDED / "events.jsonl")
STARTED = datetime.fromisoformat(load(RECORDED).info["started_at"]).timestamp()
HOSTILE = (
    "</script><script>alert('a')</script><img src=x onerror=alert(1)> & \"quoted\" {{ 7 * 7 }}"
)


def event(kind, at, **fields):
    return {"event": kind, "time": STARTED + at, **fields}


def trajectory(ticket, worker, start, seconds, **fields):
    """A response of the first version that takes so long from so many seconds after the start."""
    times = {"started_at": STARTED + start, "ended_at": STARTED + start + seconds}
    fields = {"group": 0, "tokens": 10, "finish_reason": "stop", "min_version": 0} | fields
    return event("trajectory", start + seconds, ticket=ticket, worker=worker, **times, **fields)


def dying_worker():
    """It starts at second 1, dies at 10, works again from 13.9 on and ends at 25."""
    changes = {5.0: ("decoding", ""), 13.9: ("paused", "update"), 14.1: ("starved", "round")}
    states = [
        event("worker_state", at, worker=0, changes=[[STARTED + at, *state]])
        for at, state in changes.items()
    ]
    failed = {"finish_reason": "failed", "reward": None, "failure": "it </script> broke"}
    return [
        event("worker_started", 1.0, worker=0, attempt=0),
        states[0],
        trajectory(9000, 0, 6.0, 1.0, **failed),
        event("worker_died", 10.0, worker=0, exit_code=-9, tickets=4),
        event("worker_started", 10.1, worker=0, attempt=1),
        event("worker_ready", 14.0, worker=0, startup_s=3.0),
        *states[1:],
        event("worker_time", 25.5, worker=0, until=STARTED + 25.0),
    ]


def host_events():
    """Host `far` joins at second 6 and stays, with worker 2. `far.2` with worker 3 is there from 8 to 20."""
    measured = {"mb_sent": 2.0, "mb_received": 0.5, "tokens_per_s": 40.0}
    return [
        event("machine_joined", 6.0, machine="far"),
        event("worker_started", 7.0, worker=2, attempt=0, machine="far"),
        event("machine_joined", 8.0, machine="far.2"),
        event("worker_started", 9.0, worker=3, attempt=0, machine="far.2"),
        event("machine", 10.0, machine="far", lag=1.0, **measured),
        event("machine", 12.0, machine="far", lag=2.0, **measured),
        event("machine", 12.0, machine="far.2", **measured),
        *[trajectory(8000 + i, 2, 11.0 + i, 0.5) for i in range(3)],
        trajectory(8010, 3, 15.0, 0.5, tokens=70),
        event("mismatch", 14.0, worker=2, **{"mismatch/k3": 2e-6}),
        event("machine_left", 20.0, machine="far.2", why="was silent", tickets=4),
        event("worker_died", 20.0, worker=3, tickets=4),
    ]


def write_lines(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path):
    path = shutil.copytree(RECORDED, tmp_path / "my run")
    write_lines(path / "events.jsonl", EVENTS + host_events())
    write_lines(path / "node_1" / "events.jsonl", dying_worker())
    write_lines(
        path / "samples.jsonl",
        [*read(path / "samples.jsonl"), {"step": 39, "response": HOSTILE, "reward": 0.1 + 0.2}],
    )
    return path


def page_of(run, now=STARTED + 10_000):
    """What the page of a run shows. Every cell of its tables stands in the HTML in its order."""
    loaded = load(run)
    page = report.make_page(loaded, trace(loaded), now)
    shown = [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", report.render(page))]
    rows = [row for table in page["tables"].values() for row in table.itertuples()]
    assert shown == [str(value) for row in rows for value in row]
    return page


def table(page, title):
    """The cells of a table by the names of its rows."""
    (found,) = (table for name, table in page["tables"].items() if title in name)
    return dict(zip(found.index, found.to_numpy().tolist(), strict=True))


def curves(page):
    return {
        chart["title"]: {series["name"]: series["points"] for series in chart["series"]}
        for chart in page["data"]["charts"]
    }


def lanes_of(run):
    """The bars and moments of each lane, times in seconds."""
    lanes = {}
    for bar in trace(load(run))["traceEvents"]:
        if bar["name"] == "process_name":
            lanes[bar["pid"]] = (bar["args"]["name"], [])
        elif bar["ph"] != "M":
            start = bar["ts"] / 1e6
            end = start + bar.get("dur", 0) / 1e6
            lanes[bar["pid"]][1].append(bar | {"start": start, "end": end})
    return dict(lanes.values())


def spans(bars, *rows_or_kinds):
    """Kind, start and end of the bars in these rows or of these kinds."""
    return [
        (bar["cat"], round(bar["start"], 4), round(bar["end"], 4))
        for bar in bars
        if bar["tid"] in rows_or_kinds or bar["cat"] in rows_or_kinds
    ]


def run_script(*arguments):
    command = [sys.executable, ROOT / "scripts/report.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# Page


def test_the_header_says_what_was_run_and_how_it_differs_from_the_default_job(run):
    info = json.loads((run / "run.json").read_text())
    info["git_diff"] = "diff --git a/x.py b/y.py\n--- a/x.py\n+++ b/y.py\n-one\n+two\n+three"
    info["config"] = json.loads(json.dumps(Config(algo="tis", steps=38).as_dict())) | {"gone": 1}
    (run / "run.json").write_text(json.dumps(info))
    facts = page_of(run)["facts"]
    assert facts["command"].startswith("python train_async.py --model smollm2")
    assert facts["options"] == "algo = tis, steps = 38, gone = 1"
    assert facts["commit"] == f"{info['git_commit']}, dirty: +2 −1 lines in y.py (see run.json)"
    assert re.findall(r"\d:\d\d:\d\d", facts["lasted"]) == ["0:04:58", "0:00:11", "0:00:12"]
    hosts = "remote hosts that joined: 2, that left before the end: 1"
    assert facts["outcome"] == f"finished: all 38 steps; worker deaths: 1; {hosts}"


def test_every_curve_has_the_points_of_its_metric(run):
    drawn = curves(page_of(run))
    points = [curve for chart in drawn.values() for curve in chart.values()]
    names = "staleness/max response/length_mean reward/zero_variance_groups rollout/tokens_per_s loss/total "
    names += "loss/grad_norm drift/k3 mismatch/k3 loss/entropy loss/clipped/lag_1 loss/ess/lag_1 time/step_s "
    for name in (names + "trainer_time/wait worker_time/decoding").split():
        recorded = [(m["step"], m[name]) for m in METRICS if m.get(name) is not None]
        assert recorded and recorded in points, name
    assert "save" not in drawn["Trainer's time, share of each step"]
    by_samples = drawn["Reward and held-out accuracy over samples"]
    assert by_samples["reward"] == [(m["samples"], m["reward/mean"]) for m in METRICS]
    samples = {m["step"]: m["samples"] for m in METRICS} | {0: 0}
    evaluated = {
        m["eval/policy_version"]: m["eval/accuracy"] for m in METRICS if "eval/accuracy" in m
    }
    expected = [(samples[version], accuracy) for version, accuracy in evaluated.items()]
    assert by_samples["held-out accuracy"] == expected


def test_the_ledgers_are_those_of_the_last_line_and_sum(run):
    page = page_of(run)
    for unit, total in (("groups", "issued"), ("tokens", "generated")):
        ledger = table(page, f"the {unit} went")
        counts = {
            name.replace(": ", "_").replace(" ", "_"): int(n) for name, (n, _) in ledger.items()
        }
        prefix = f"ledger/{unit}_"
        assert counts == {
            k.removeprefix(prefix): v for k, v in METRICS[-1].items() if k.startswith(prefix)
        }
        assert sum(counts.values()) == 2 * counts[total] and "dropped: shut out" in ledger
        assert ledger["consumed"][1] == f"{counts['consumed'] / counts[total]:.1%}"


def test_where_time_went_is_what_trainer_and_workers_recorded(run):
    page = page_of(run)
    trainer = table(page, "trainer's time")
    steps_s = sum(m["time/step_s"] for m in METRICS)
    assert "optimizer" in trainer and "save" not in trainer, "states that occurred"
    for state, (seconds, share) in trainer.items():
        spent = sum(m.get(f"trainer_time/{state}", 1.0) * m["time/step_s"] for m in METRICS)
        assert seconds == f"{spent:.2f}" and share == f"{spent / steps_s:.1%}"
    assert float(trainer["all steps"][0]) == pytest.approx(steps_s, abs=0.01)
    (recorded,) = (e["seconds"] for e in EVENTS if e["event"] == "worker_time")
    dying = {"starting": 4.0, "decoding": 5.0, "restarting": 3.9, "paused": 0.2, "starved": 10.9}
    states = recorded.keys() | dying.keys()
    workers = table(page, "workers' time")
    for state in states:
        seconds = sum(float(row[0]) for name, row in workers.items() if name.split(":")[0] == state)
        assert seconds == pytest.approx(recorded.get(state, 0) + dying.get(state, 0), abs=0.03)
    total = float(workers["all workers"][0])
    assert total == pytest.approx(sum(recorded.values()) + sum(dying.values()), abs=0.03)
    assert workers["restarting"][2] == f"0.0% … {3.9 / 24:.1%}"


def test_samples_are_spread_over_the_run_escaped_and_rounded(run):
    page = page_of(run)
    steps = [sample["step"] for sample in page["samples"]]
    assert len({*steps}) == report.NUM_SAMPLES and (steps[0], steps[-1]) == (1, 39)
    text = report.render(page)
    recorded = [s for s in read(run / "samples.jsonl") if s["step"] in steps]
    assert [html.unescape(shown) for shown in re.findall("<pre>(.*?)</pre>", text, re.DOTALL)] == [
        sample["response"] for sample in recorded
    ]
    assert text.count("best of its group") == sum(
        s["reward"] > s.get("group_reward", 1) for s in recorded
    )
    assert "<b>reward</b> 0.3<" in text, "and not 0.30000000000000004"


def test_what_a_run_has_written_is_text_and_the_page_needs_nothing_but_itself(run):
    text = report.render(page_of(run))
    assert text.count("</script>") == 2 and "<img" not in text and "{%" not in text
    assert "default-src 'none'" in text
    assert set(re.findall(' (?:src|href)="(.*?)"', text)) == {"data:,"}
    data = re.search('id="data" type="text/plain">(.*?)<', text)[1]
    assert "it </script> broke" in gzip.decompress(base64.b64decode(data)).decode()


def test_a_run_of_one_step_and_nothing_else_has_a_page(run):
    optional = ("ledger", "trainer_time", "eval")
    bare = {name: value for name, value in METRICS[0].items() if not name.startswith(optional)}
    write_lines(run / "metrics.jsonl", [bare])
    for name in ("events.jsonl", "events.jsonl.gz", "samples.jsonl", "node_1/events.jsonl"):
        (run / name).unlink()
    page = page_of(run)
    assert page["tables"] == {} and page["samples"] == []
    assert {"Held-out accuracy", "Trainer's time, share of each step"} <= {*page["missing"]}


@pytest.mark.parametrize(
    ("ended", "age_s", "outcome"),
    [
        ([], 7, "still training, or ended just now: 2 of 38 steps, last record 7 s ago"),
        ([], 600, "ended early: 2 of 38 steps; worker_"),
        (
            [event("run_ended", 1, reason="Interrupted")],
            7,
            "ended early: 2 of 38 steps; Interrupted",
        ),
    ],
)
def test_a_run_that_was_killed_or_still_trains_is_reported_as_far_as_it_got(
    run, ended, age_s, outcome
):
    write_lines(run / "metrics.jsonl", METRICS[:2])
    write_lines(run / "events.jsonl", ended)
    with open(run / "events.jsonl", "a") as file:
        file.write('{"event": "traj')
    facts = page_of(run, STARTED + 25.5 + age_s)["facts"]
    assert facts["outcome"].startswith(outcome) and "advice" not in facts
    assert facts["left out"] == "the last line of events.jsonl, which is half written"


def test_advice_on_devices_stands_on_the_page_if_the_extra_is_there(run, monkeypatch):
    assert page_of(run)["facts"]["advice"]
    monkeypatch.setitem(extras.MODULES, "advice", "extras.nowhere.advice")
    assert "advice" not in page_of(run)["facts"]


# Several runs, and the command


def test_several_runs_have_one_page_with_how_they_differ_and_a_line_each_in_every_chart(run):
    other = ROOT / "results/smollm2/one_digit-s1"
    page = report.make_comparison([load(run), load(other)])
    assert page["facts"]["one_digit-s1"] == "seed = 1, 38 of 38 steps"
    drawn = curves(page)
    recorded = {"my run": METRICS, "one_digit-s1": read(other / "metrics.jsonl")}
    assert drawn["Loss: loss"] == {
        n: [(m["step"], m["loss/total"]) for m in ms] for n, ms in recorded.items()
    }
    accuracy = [f"{metrics[-1]['eval/accuracy']:.3f}" for metrics in recorded.values()]
    assert table(page, "Summary")["held-out accuracy, last"] == accuracy
    assert {sample["run"] for sample in page["samples"]} == {*recorded}
    result = run_script(run, other)
    assert result.stdout.endswith(f"comparison: {run / 'comparison.html'}\n"), result.stderr
    assert (run / "comparison.html").read_text() == report.render(page)
    assert "--trace is of one run" in run_script(run, other, "--trace").stderr


def test_the_command_writes_page_and_trace_and_ends_a_mistake_with_one_line(run, tmp_path):
    result = run_script(run, "--trace")
    assert result.stdout.endswith(f"report: {run / 'report.html'}\ntrace: {run / 'trace.json'}\n")
    assert json.loads((run / "trace.json").read_text()) == trace(load(run))
    result = run_script(tmp_path / "none")
    assert result.returncode == 1 and result.stdout == ""
    assert re.fullmatch("error: .*none/metrics.jsonl does not exist; .*\n", result.stderr)


# Timeline


def test_the_trace_has_a_bar_for_every_response_step_update_and_evaluation(run):
    lanes = lanes_of(run)
    recorded = EVENTS + host_events() + dying_worker()
    responses = [bar for bars in lanes.values() for bar in bars if bar["cat"] == "response"]
    bars = {bar["args"]["ticket"]: bar for bar in responses if bar["args"]["group"] >= 0}
    for ended in (e for e in recorded if e["event"] == "trajectory" and e["group"] >= 0):
        bar = bars.pop(ended["ticket"])
        assert bar["args"].items() <= ended.items()
        assert STARTED + bar["start"] == pytest.approx(ended["started_at"], abs=1e-5)
        assert STARTED + bar["end"] == pytest.approx(ended["ended_at"], abs=1e-5)
    assert not bars, "no other response"
    assert len(spans(lanes["trainer"], "step")) == len(METRICS)
    assert len(spans(lanes["worker 0"], "update")) == sum(e["event"] == "update" for e in EVENTS)
    evaluations = [e for e in EVENTS if e["event"] == "evaluation"]
    assert [bar["args"] for bar in lanes["evaluation"]] == [
        {"version": e["version"], "responses": 22, "accuracy": e["accuracy"]} for e in evaluations
    ]


def test_bars_of_one_row_never_overlap_and_rows_are_as_few_as_responses_at_once(run):
    for bars in lanes_of(run).values():
        bars = sorted((bar for bar in bars if bar["ph"] == "X"), key=lambda bar: bar["ts"])
        for row in {bar["tid"] for bar in bars}:
            in_row = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["tid"] == row]
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(in_row))
        responses = [bar for bar in bars if bar["cat"] == "response"]
        starts = [(bar["ts"], 1) for bar in responses]
        ends = [(bar["ts"] + bar["dur"], -1) for bar in responses]
        at_once = itertools.accumulate(change for _, change in sorted(starts + ends))
        assert len({bar["tid"] for bar in responses}) == max(at_once, default=0)


def test_a_workers_states_follow_on_each_other_and_moments_are_marked(run):
    worker = lanes_of(run)["worker 1.0"]
    assert [span for span in spans(worker, 0) if span[1] < span[2]] == [
        ("starting", 1, 5), ("decoding", 5, 10), ("restarting", 10, 13.9), ("paused", 13.9, 14.1),
        ("starved", 14.1, 25),
    ]  # fmt: skip
    assert spans(worker, "started", "died") == [("died", 10, 10), ("started", 14, 14)]
    write_lines(run / "node_1" / "events.jsonl", dying_worker()[:4])
    end = EVENTS[-1]["time"] - STARTED
    assert spans(lanes_of(run)["worker 1.0"], "restarting") == [("restarting", 10, round(end, 4))]


def test_two_evaluations_of_one_version_are_two_bars_and_one_that_did_not_end_is_one(run):
    events = [
        *[trajectory(i, 0, 1.0, 2.0, group=-1) for i in range(3)],
        event("evaluation", 3.1, version=0, accuracy=0.25),
        trajectory(3, 0, 5.0, 2.0, group=-1),
        event("evaluation", 7.1, version=0, accuracy=None),
        trajectory(4, 0, 9.0, 2.0, group=-1),
    ]
    write_lines(run / "events.jsonl", EVENTS[:1] + events)
    bars = lanes_of(run)["evaluation"]
    assert [span[1:] for span in spans(bars, 0)] == [(1, 3.1), (5, 7.1), (9, 11)]
    assert [tuple(bar["args"].values()) for bar in bars] == [
        (0, 3, 0.25),
        (0, 1, None),
        (0, 1, None),
    ]


def test_remote_hosts_have_a_lane_with_their_number_and_their_workers_have_one_bar(run):
    lanes = lanes_of(run)
    workers = ["worker 0", "worker 2 (far)", "worker 3 (far.2)", "worker 1.0"]
    assert [*lanes] == ["trainer", "evaluation", "remote hosts", *workers]
    end = round(EVENTS[-1]["time"] - STARTED, 4)
    hosts = lanes["remote hosts"]
    assert spans(hosts, "hosts") == [("hosts", 6, 8), ("hosts", 8, 20), ("hosts", 20, end)]
    numbers = [bar["name"] for bar in hosts if bar["cat"] == "hosts"]
    assert numbers == [f"remote hosts: {number}" for number in (1, 2, 1)]
    assert spans(hosts, "joined", "left") == [("joined", 6, 6), ("joined", 8, 8), ("left", 20, 20)]
    assert spans(lanes["worker 2 (far)"], "away") == [("away", 7, end)]
    assert spans(lanes["worker 3 (far.2)"], 0) == [("left", 20, 20), ("away", 9, 20)]


def test_each_remote_host_has_a_row_and_curves_those_that_sampled_most_first(run):
    page = page_of(run)
    assert table(page, "remote hosts") == {
        "far.2": ["12", "1", "70", "5.833", "", "2", "0.5", "", "was silent"],
        "far": ["8", "3", "30", "3.75", "1.5", "4", "1", "2e-06", ""],
        "all 2": ["14", "4", "100", "7.143", "1.5", "6", "1.5", "2e-06", ""],
    }
    drawn = curves(page)["Generated tokens/s, by host"]
    rates = {host: [(round(x, 3), y) for x, y in points] for host, points in drawn.items()}
    assert rates == {"far.2": [(12.0, 40.0)], "far": [(10.0, 40.0), (12.0, 40.0)]}


# In a browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    with playwright.sync_playwright() as api:
        path = next(filter(None, map(shutil.which, names)), api.chromium.executable_path)
        if not Path(path).exists():
            pytest.skip(f"no browser is installed: none of {', '.join(names)}")
        browser = api.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_the_page_and_names_what_is_under_the_pointer(run, browser, scheme, width):
    page = page_of(run)
    file = run / "page.html"
    file.write_text(report.render(page))
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems = []
    view.on("console", lambda message: problems.append(message.text))
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.goto(file.as_uri())
    view.wait_for_selector("#key span")
    background = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(245, 246, 249)") == (scheme == "light")
    assert view.evaluate("document.documentElement.scrollWidth") == width, "nothing is cut off"
    assert view.locator("#charts polyline").count() == sum(map(len, curves(page).values()))
    canvas = view.locator("#timeline")
    tips = []
    for x in range(100, width - 100, width // 50):
        canvas.hover(position={"x": x, "y": 158})
        tips.append(view.locator("#tip").inner_text())
    assert any(tip.startswith("response\nticket: ") for tip in tips), tips
    pixels = "canvas => canvas.toDataURL()"
    whole = canvas.evaluate(pixels)
    view.mouse.wheel(0, -600)
    # The page draws at the next frame, however late a busy machine has it.
    drawn = "document.querySelector('#timeline').toDataURL()"
    view.wait_for_function(f"whole => {drawn} !== whole", arg=whole)  # the wheel zooms
    view.get_by_role("button", name="whole run").click()
    view.wait_for_function(f"whole => {drawn} === whole", arg=whole)
    view.fill("#least", "0.5")
    good = [sample for sample in page["samples"] if sample["reward"] >= 0.5]
    assert view.locator("#count").inner_text() == f"{len(good)} of {len(page['samples'])}"
    assert view.locator(".sample:visible").count() == len(good)
    assert problems == []
    view.close()
