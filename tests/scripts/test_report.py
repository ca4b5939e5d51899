"""The report of a run: what its page and its trace say of a run written here, and that a browser draws it."""

import base64
import gzip
import html
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import extras
from asyncrl.config import Config
from scripts import report
from scripts.runs import load
from scripts.timeline import trace

ROOT = Path(__file__).parents[2]
STARTED = 1_700_000_000.0
"""2023-11-14T22:13:20Z."""
STEPS, STEP_S, STARTUP_S = 12, 2.0, 5.0
HOSTILE = (
    "</script><script>alert('a')</script><img src=x onerror=alert(1)> & \"quoted\" {{ 7 * 7 }}"
)
RUN = {
    "command": ["python", "train_async.py", "--task", "a task"],
    "world_size": 2,
    "config": {"algo": "tis", "task": "addition", "steps": STEPS, "async_ratio": 2.0, "gone": 1},
    "git_commit": "0123abc",
    "git_diff": "diff --git a/x.py b/y.py\n--- a/x.py\n+++ b/y.py\n-one\n+two\n+three",
    "packages": {"torch": "9.9"},
    "python": "3.11.0",
    "hardware": {"cpu_cores": 2, "cpu": "Some CPU", "gpus": ["H200", "H200"]},
    "started_at": "2023-11-14T22:13:20+0000",
}


def metrics_line(step, **more):
    """A step of 2 s: 8 groups of 4 consumed, 1 dropped, 10 tokens per response."""
    line = {
        "step": step,
        "samples": 32 * step,
        "reward/mean": step / 20,
        "reward/format": 0.25,
        "reward/zero_variance_groups": 0.125,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "response/length_mean": 10.0 + step,
        "ledger/groups_issued": 9 * step + 3,
        "ledger/groups_consumed": 8 * step,
        "ledger/groups_resident": 3,
        "ledger/groups_dropped_shut_out": step,
        "ledger/tokens_generated": 360 * step,
        "ledger/tokens_consumed": 320 * step,
        "ledger/tokens_resident": 0,
        "ledger/tokens_dropped_stale": 40 * step,
        "tokens/generated": 360 * step,
        "loss/total": 0.01 * step,
        "loss/entropy": 0.5,
        "loss/clipped/lag_1": None if step == 1 else 0.2,
        "mismatch/k3": 1e-7 * step,
        "time/wait_s": 0.8,
        "time/step_s": STEP_S,
        "trainer_time/wait": 0.4,
        "trainer_time/gather": 0.0,
        "trainer_time/forward_backward": 0.6,
        "worker_time/decoding": 0.75,
    }
    if step in (6, 12):
        line |= {"eval/accuracy": step / 12, "eval/policy_version": step}
    return line | more


def event(kind, at, **fields):
    return {"event": kind, "time": STARTED + at, **fields}


def trajectory(ticket, worker, start, seconds, version, **changes):
    fields = {
        "ticket": ticket,
        "group": ticket // 4,
        "member": ticket % 4,
        "worker": worker,
        "started_at": STARTED + start,
        "ended_at": STARTED + start + seconds,
        "tokens": 10,
        "finish_reason": "stop",
        "reward": 1.0,
        "min_version": version,
        "max_version": version,
    }
    return event("trajectory", start + seconds, **fields) | changes


def state_events(worker, changes):
    """A report after each change (second, state, reason)."""
    return [
        event("worker_state", at, worker=worker, changes=[[STARTED + at, *state]])
        for at, *state in changes
    ]


def life_events():
    """Worker 0 lives from second 1 to 29. Worker 1 lives from 1 to 25, and is dead from 10 to 13.9."""
    first = [(5.0, "gated", "weights"), (6.0, "decoding", ""), (27.0, "gated", "bound")]
    again = [(13.9, "paused", "update"), (14.1, "decoding", ""), (24.0, "starved", "round")]
    return [
        *[event("worker_started", 1.0, worker=worker, attempt=0) for worker in (0, 1)],
        *[event("worker_ready", 5.0, worker=worker, startup_s=4.0) for worker in (0, 1)],
        *state_events(0, first),
        event("worker_time", 29.5, worker=0, until=STARTED + 29.0),
        *state_events(1, [(5.0, "decoding", "")]),
        event("worker_died", 10.0, worker=1, exit_code=-9, tickets=4),
        event("worker_started", 10.1, worker=1, attempt=1),
        event("worker_ready", 14.0, worker=1, startup_s=3.0),
        *state_events(1, again),
        event("worker_time", 29.5, worker=1, until=STARTED + 25.0),
    ]


def make_events():
    """Two workers, the second of which dies. Version 6 is evaluated; a response fails, and one never starts."""
    events = life_events()
    for step in range(1, STEPS + 1):
        start = STARTUP_S + (step - 1) * STEP_S
        for i in range(32):
            ticket = 32 * (step - 1) + i
            seconds = 1.2 + 0.01 * (i % 7)
            events.append(trajectory(ticket, i % 2, start + 0.01 * i, seconds, step - 1))
        events.append(event("update", start + 1.95, worker=0, version=step, pause_s=0.03))
        times = [STARTED + start + after for after in (0.0, 0.8, STEP_S)]
        spans = [["wait", *times[:2]], ["forward_backward", *times[1:]]]
        groups = [*range(8 * step - 8, 8 * step)]
        events.append(event("step", start + STEP_S, step=step, spans=spans, groups=groups))
    events += [trajectory(9000 + i, i % 2, 17.0, 0.5, 6, group=-1) for i in range(4)]
    events.append(event("evaluation", 17.6, version=6, accuracy=0.5))
    failed = {"finish_reason": "failed", "reward": None, "failure": "it </script> broke"}
    events.append(trajectory(9100, 0, 20.0, 0.4, 7, **failed))
    unstarted = trajectory(9101, 1, 20.0, 0.0, 7, finish_reason="aborted", reward=None, tokens=0)
    return [*events, {k: v for k, v in unstarted.items() if not k.endswith("_version")}]


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
        *[trajectory(8000 + i, 2, 11.0 + i, 0.5, 2) for i in range(3)],
        trajectory(8010, 3, 15.0, 0.5, 2, tokens=70),
        event("mismatch", 12.0, worker=0, **{"mismatch/k3": 9.0}),
        event("mismatch", 14.0, worker=2, **{"mismatch/k3": 2e-6}),
        event("machine_left", 20.0, machine="far.2", why="was silent", tickets=4),
        event("worker_died", 20.0, worker=3, tickets=4),
    ]


def write_lines(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "my run"
    write_lines(path / "metrics.jsonl", [metrics_line(step) for step in range(1, STEPS + 1)])
    write_lines(path / "events.jsonl", make_events())
    (path / "run.json").write_text(json.dumps(RUN))
    sample = {"prompt": "what?", "response": HOSTILE, "reward": 0.1 + 0.2, "group_reward": 0.1}
    write_lines(path / "samples.jsonl", [{"step": step, **sample} for step in range(1, 60)])
    return path


def page_of(run, now=STARTED + 10_000):
    """What the page of a run shows. Every cell of its tables stands in the HTML in its order."""
    loaded = load(run)
    page = report.make_page(loaded, trace(loaded), now)
    text = report.render(page)
    shown = [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", text)]
    assert shown == [
        str(v) for table in page["tables"].values() for row in table.itertuples() for v in row
    ]
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
            bar |= {"start": start, "end": start + bar.get("dur", 0) / 1e6}
            lanes[bar["pid"]][1].append(bar)
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
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# Page


def test_the_header_says_what_was_run_and_how_it_differs_from_the_default_job(run):
    facts = page_of(run)["facts"]
    assert facts["command"] == "python train_async.py --task 'a task'"
    assert facts["options"] == "algo = tis, steps = 12, async_ratio = 2, gone = 1"
    assert facts["commit"] == "0123abc, dirty: +2 −1 lines in y.py (see run.json)"
    assert facts["outcome"] == "finished: all 12 steps; worker deaths: 1"
    assert re.findall(r"\d:\S\S:\d\d", facts["lasted"]) == ["0:00:30", "0:00:05", "0:00:00"]
    assert report.changed_options(json.loads(json.dumps(Config().as_dict()))) == ""


def test_every_curve_has_the_points_of_its_metric(run):
    drawn = curves(page_of(run))
    points = [curve for chart in drawn.values() for curve in chart.values()]
    lines = [metrics_line(step) for step in range(1, STEPS + 1)]
    charted = (
        r"(reward|response|staleness|loss|mismatch|trainer_time|worker_time)/|time/(wait|step)"
    )
    for name in filter(re.compile(charted).match, lines[0]):
        if name not in ("reward/mean", "trainer_time/gather"):
            values = [(line["step"], line[name]) for line in lines if line[name] is not None]
            assert values in points, name
    assert len(points) == 18, "no other curve"
    by_samples, by_time = (
        drawn[f"Reward and held-out accuracy over {x}"] for x in ("samples", "seconds")
    )
    assert by_samples["held-out accuracy"] == [(192, 0.5), (384, 1.0)]
    assert by_time["reward"] == [(STEP_S * line["step"], line["reward/mean"]) for line in lines]


def test_the_ledgers_are_those_of_the_last_line_and_sum(run):
    page, last = page_of(run), metrics_line(STEPS)
    for unit, total in (("groups", "issued"), ("tokens", "generated")):
        ledger = table(page, f"the {unit} went")
        counts = {
            name.replace(": ", "_").replace(" ", "_"): int(n) for name, (n, _) in ledger.items()
        }
        recorded = {
            n.split("_", 1)[1]: v for n, v in last.items() if n.startswith(f"ledger/{unit}")
        }
        assert counts == recorded
        assert sum(counts.values()) == 2 * counts[total]
        assert ledger["consumed"][1] == f"{counts['consumed'] / counts[total]:.1%}"


def test_where_time_went_sums_to_the_steps_and_to_the_workers_lives(run):
    page = page_of(run)
    trainer = {
        state: float(seconds) for state, (seconds, _) in table(page, "trainer's time").items()
    }
    assert trainer == {"wait": 9.6, "forward_backward": 14.4, "all steps": STEPS * STEP_S}
    workers = table(page, "workers' time")
    assert {state: float(seconds) for state, (seconds, *_) in workers.items()} == {
        "decoding": 21 + 5 + 9.9,
        "starting": 4 + 4,
        "restarting": 3.9,
        "gated: bound": 2,
        "gated: weights": 1,
        "starved: round": 1,
        "paused: update": 0.2,
        "all workers": 28 + 24,
    }
    assert workers["restarting"][1:] == ["7.5%", "0.0% … 16.2%"]


def test_samples_are_spread_over_the_run_and_their_numbers_are_rounded(run):
    page = page_of(run)
    assert [sample["step"] for sample in page["samples"]] == [*range(1, 60, 2)]
    text = report.render(page)
    assert text.count("<b>reward</b> 0.3<") == text.count("best of its group") == 30
    assert html.unescape(text).count(HOSTILE) == 30
    members = [
        {"step": 1, "group": 7, "response": str(reward), "reward": reward} for reward in (1.0, 0.0)
    ]
    write_lines(
        run / "samples.jsonl", [member | {"group_reward": 0.5, "answer": "4"} for member in members]
    )
    text = report.render(page_of(run))
    assert re.findall("(best|worst) of its group|<pre>(.*?)</pre>", text) == [
        ("best", ""), ("", "1.0"), ("worst", ""), ("", "0.0"),
    ]  # fmt: skip
    assert text.count('<pre class="answer">4</pre>') == 2


def test_what_a_run_has_written_is_text_and_the_page_needs_nothing_but_itself(run):
    text = report.render(page_of(run))
    assert text.count("</script>") == 2 and "<img" not in text and "{%" not in text
    assert "default-src 'none'" in text and set(re.findall(' (?:src|href)="(.*?)"', text)) == {
        "data:,"
    }
    data = re.search('id="data" type="text/plain">(.*?)<', text)[1]
    assert "it </script> broke" in gzip.decompress(base64.b64decode(data)).decode()


def test_a_run_of_one_step_and_nothing_else_has_a_page(run):
    bare = {
        k: v for k, v in metrics_line(1).items() if not k.startswith(("ledger", "trainer_time"))
    }
    write_lines(run / "metrics.jsonl", [bare])
    (run / "events.jsonl").unlink()
    (run / "samples.jsonl").unlink()
    page = page_of(run)
    assert page["tables"] == {} and page["samples"] == []
    assert {"Held-out accuracy", "Trainer's time, share of each step"} <= {*page["missing"]}
    assert "No sample has been recorded" in report.render(page)


@pytest.mark.parametrize(
    ("ended", "age_s", "outcome"),
    [
        ([], 7, "still training, or ended just now: 2 of 12 steps, last record 7 s ago"),
        ([], 600, "ended early: 2 of 12 steps; worker_"),
        (
            [event("run_ended", 1, reason="Interrupted")],
            7,
            "ended early: 2 of 12 steps; Interrupted",
        ),
    ],
)
def test_a_run_that_was_killed_or_still_trains_is_reported_as_far_as_it_got(
    run, ended, age_s, outcome
):
    write_lines(run / "metrics.jsonl", [metrics_line(1), metrics_line(2)])
    write_lines(run / "events.jsonl", make_events() + ended)
    with open(run / "events.jsonl", "a") as file:
        file.write('{"event": "traj')
    facts = page_of(run, STARTED + 29.5 + age_s)["facts"]
    assert facts["outcome"].startswith(outcome) and "advice" not in facts
    assert facts["left out"] == "the last line of events.jsonl, which is half written"


def test_advice_on_devices_stands_on_the_page_if_the_extra_is_there(run, monkeypatch):
    (run / "run.json").write_text(json.dumps(RUN | {"world_size": 1}))
    assert re.match(r"--async-ratio \d", page_of(run)["facts"]["advice"])
    monkeypatch.setitem(extras.MODULES, "advice", "extras.nowhere.advice")
    assert "advice" not in page_of(run)["facts"]


# Several runs, and the command


def test_several_runs_have_one_page_with_how_they_differ_and_a_line_each_in_every_chart(run):
    other = shutil.copytree(run, run.parent / "other")
    (other / "run.json").write_text(json.dumps(RUN | {"config": RUN["config"] | {"algo": "grpo"}}))
    lines = [metrics_line(step, **{"reward/mean": step / 40}) for step in range(1, 5)]
    write_lines(other / "metrics.jsonl", lines)
    page = report.make_comparison([load(run), load(other)])
    steps = {"my run": "algo = tis, 12 of 12 steps", "other": "algo = grpo, 4 of 12 steps"}
    assert page["facts"] == steps
    drawn = curves(page)
    rewards = drawn["Reward and held-out accuracy over samples: reward"]
    assert rewards["other"] == [(line["samples"], line["reward/mean"]) for line in lines]
    assert [*drawn["Reward and held-out accuracy over samples: held-out accuracy"]] == ["my run"]
    assert len(drawn["Trainer's time, share of each step: wait"]["other"]) == len(lines)
    assert table(page, "Summary")["held-out accuracy, last"] == ["1.000", "–"]
    assert {sample["run"] for sample in page["samples"]} == {"my run", "other"}
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


def test_the_trace_has_a_bar_for_everything_that_took_time(run):
    lanes = lanes_of(run)
    assert [*lanes] == ["trainer", "evaluation", "worker 0", "worker 1"]
    responses = {
        bar["args"]["ticket"]: bar
        for bars in lanes.values()
        for bar in bars
        if bar["cat"] == "response"
    }
    recorded = {event["ticket"]: event for event in make_events() if event["event"] == "trajectory"}
    assert responses.keys() == recorded.keys()
    for ticket, bar in responses.items():
        assert bar["args"].items() <= recorded[ticket].items()
        assert STARTED + bar["start"] == pytest.approx(recorded[ticket]["started_at"], abs=1e-5)
        assert STARTED + bar["end"] == pytest.approx(recorded[ticket]["ended_at"], abs=1e-5)
    assert len(spans(lanes["trainer"], "step")) == len(spans(lanes["worker 0"], "update")) == STEPS
    assert spans(lanes["evaluation"], 0) == [("evaluation", 17.0, 17.6)]
    assert lanes["evaluation"][0]["args"] == {"version": 6, "responses": 4, "accuracy": 0.5}


def test_bars_of_one_row_never_overlap_and_rows_are_as_few_as_responses_at_once(run):
    write_lines(run / "events.jsonl", make_events() + host_events())
    for bars in lanes_of(run).values():
        responses = [bar for bar in bars if bar["cat"] == "response"]
        for row in {bar["tid"] for bar in bars}:
            in_row = sorted(
                (bar["ts"], bar["ts"] + bar["dur"])
                for bar in bars
                if bar["tid"] == row and "dur" in bar
            )
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(in_row))
        at_once = [
            sum(o["ts"] <= r["ts"] < o["ts"] + o["dur"] for o in responses) for r in responses
        ]
        assert len({bar["tid"] for bar in responses}) == max(at_once, default=0)


def test_a_workers_states_follow_on_each_other_and_moments_are_marked(run):
    worker = lanes_of(run)["worker 1"]
    assert [bar for bar in spans(worker, 0) if bar[1] < bar[2]] == [
        ("starting", 1, 5), ("decoding", 5, 10), ("restarting", 10, 13.9), ("paused", 13.9, 14.1),
        ("decoding", 14.1, 24), ("starved", 24, 25),
    ]  # fmt: skip
    assert spans(worker, "started", "died") == [
        ("started", 5, 5),
        ("died", 10, 10),
        ("started", 14, 14),
    ]
    events = [e for e in make_events() if e.get("worker") != 1 or e["time"] < STARTED + 13]
    write_lines(run / "events.jsonl", events)
    assert spans(lanes_of(run)["worker 1"], "restarting") == [("restarting", 10, 29.5)]


def test_workers_of_other_nodes_have_the_same_bars_in_lanes_of_their_own(run):
    before = lanes_of(run)
    events = make_events()
    write_lines(run / "events.jsonl", [e for e in events if e.get("worker") != 1])
    there = [e | {"worker": 0} for e in events if e.get("worker") == 1]
    write_lines(run / "node_1" / "events.jsonl", there)
    lanes = lanes_of(run)
    assert [*lanes] == ["trainer", "evaluation", "worker 0", "worker 1.0"]
    assert lanes["worker 1.0"] == before["worker 1"] and lanes["trainer"] == before["trainer"]


def test_two_evaluations_of_one_version_are_two_bars_and_one_that_did_not_end_is_one(run):
    events = [
        *[trajectory(i, 0, 1.0, 2.0, 0, group=-1) for i in range(3)],
        event("evaluation", 3.1, version=0, accuracy=0.25),
        trajectory(3, 0, 5.0, 2.0, 0, group=-1),
        event("evaluation", 7.1, version=0, accuracy=None),
        trajectory(4, 0, 9.0, 2.0, 1, group=-1),
    ]
    write_lines(run / "events.jsonl", events)
    bars = lanes_of(run)["evaluation"]
    assert [span[1:] for span in spans(bars, 0)] == [(1, 3.1), (5, 7.1), (9, 11)]
    values = [(0, 3, 0.25), (0, 1, None), (1, 1, None)]
    assert [tuple(bar["args"].values()) for bar in bars] == values


# Remote hosts


def test_remote_hosts_have_a_lane_with_their_number_and_their_workers_have_one_bar(run):
    spent = table(page_of(run), "workers' time")
    write_lines(run / "events.jsonl", make_events() + host_events())
    lanes = lanes_of(run)
    assert [*lanes][2:] == [
        "remote hosts",
        "worker 0",
        "worker 1",
        "worker 2 (far)",
        "worker 3 (far.2)",
    ]
    there = [
        (bar["name"], *span[1:])
        for bar, span in zip(lanes["remote hosts"], spans(lanes["remote hosts"], 0), strict=True)
    ]
    assert there == [
        ("far joined", 6, 6), ("1 hosts", 6, 8), ("far.2 joined", 8, 8), ("2 hosts", 8, 20),
        ("far.2 left", 20, 20), ("1 hosts", 20, 29.5),
    ]  # fmt: skip
    assert spans(lanes["worker 2 (far)"], "away") == [("away", 7, 29.5)]
    assert spans(lanes["worker 3 (far.2)"], 0) == [("left", 20, 20), ("away", 9, 20)]
    page = page_of(run)
    assert table(page, "workers' time") == spent, "they have no part in it"
    suffix = "worker deaths: 1; remote hosts that joined: 2, that left before the end: 1"
    assert page["facts"]["outcome"].endswith(suffix)


def test_each_remote_host_has_a_row_and_curves_those_that_sampled_most_first(run):
    assert not any("host" in title for title in page_of(run)["tables"])
    write_lines(run / "events.jsonl", make_events() + host_events())
    page = page_of(run)
    assert table(page, "remote hosts") == {
        "far.2": ["12.0", "1", "70", "5.8", "", "2.0", "0.5", "", "was silent"],
        "far": ["8.0", "3", "30", "3.8", "1.50", "4.0", "1.0", "2e-06", ""],
        "all 2": ["14.0", "4", "100", "7.1", "1.50", "6.0", "1.5", "2e-06", ""],
    }
    drawn = curves(page)
    rates = {"far.2": [(12.0, 40.0)], "far": [(10.0, 40.0), (12.0, 40.0)]}
    assert drawn["Generated tokens/s, by host"] == rates
    mismatch = drawn["Mismatch with the trainer, k3, nats per token, by host"]
    assert mismatch == {"far": [(14.0, 2e-6)]}


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
    box = canvas.bounding_box()
    tips = []
    for share in (0.25, 0.4, 0.5, 0.6, 0.8):
        canvas.hover(position={"x": box["width"] * share, "y": box["height"] - 30})
        tips.append(view.locator("#tip").inner_text())
    assert any(tip.startswith("response\nticket: ") for tip in tips), tips
    pixels = "canvas => canvas.toDataURL()"
    whole = canvas.evaluate(pixels)
    view.mouse.wheel(0, -600)
    view.wait_for_timeout(100)
    assert canvas.evaluate(pixels) != whole, "the wheel zooms"
    view.get_by_role("button", name="whole run").click()
    view.wait_for_timeout(100)
    assert canvas.evaluate(pixels) == whole
    view.fill("#least", "0.5")
    assert view.locator("#count").inner_text() == "0 of 30"
    assert problems == []
    view.close()
