"""The report of a run: what its page and its trace say of a run made up here, and that a browser can draw it."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from asyncrl import extras
from scripts import report
from scripts.runs import load
from scripts.timeline import STATE_COLORS, build_timeline, pack, trace

ROOT = Path(__file__).parents[2]

STARTED = 1_700_000_000.0
"""2023-11-14T22:13:20Z."""
STEPS, STEP_S, STARTUP_S = 12, 2.0, 5.0
HOSTILE = (
    "</script><script>alert('a')</script><img src=x onerror=alert(1)> & \"quoted\" {{ 7 * 7 }}"
)
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "headless_shell",
)


def metrics_line(step):
    """2 s a step; 8 groups of 4 consumed, 1 dropped and 10 tokens per response."""
    line = {
        "step": step,
        "policy_version": step,
        "samples": 32 * step,
        "reward/mean": step / 20,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "ledger/groups_issued": 9 * step + 3,
        "ledger/groups_consumed": 8 * step,
        "ledger/groups_resident": 3,
        "ledger/tokens_generated": 360 * step,
        "ledger/tokens_consumed": 320 * step,
        "ledger/tokens_resident": 0,
        "ledger/groups_dropped_stale": step,
        "ledger/tokens_dropped_stale": 40 * step,
        "tokens/generated": 360 * step,
        "loss/entropy": 0.5,
        "loss/clipped": 0.1,
        "loss/clipped/lag_0": 0.0,
        "loss/clipped/lag_1": None if step == 1 else 0.2,
        "loss/clipped/lag_9+": 0.3,
        "time/wait_s": 0.8,
        "time/train_s": 1.0,
        "time/publish_s": 0.1,
        "time/step_s": STEP_S,
        "trainer_time/wait": 0.4,
        "trainer_time/gather": 0.0,
        "trainer_time/forward_backward": 0.5,
        "trainer_time/publish": 0.05,
        "trainer_time/other": 0.05,
        "worker_time/decoding": 0.75,
        "worker_time/gated": 0.25,
        "worker_time/starved": 0.0,
    }
    evaluated = {"eval/accuracy": step / 12, "eval/policy_version": step}
    return line | evaluated if step in (6, 12) else line


def trajectory(ticket, worker, start, seconds, version, **changes):
    event = {
        "event": "trajectory",
        "time": STARTED + start + seconds,
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
    return event | changes


def step_event(step):
    start = STARTED + STARTUP_S + (step - 1) * STEP_S
    times = [start, start + 0.8, start + 1.8, start + 1.9, start + STEP_S]
    states = ("wait", "forward_backward", "publish", "other")
    spans = [[state, *span] for state, span in zip(states, itertools.pairwise(times), strict=True)]
    return {"event": "step", "time": start + STEP_S, "step": step, "spans": spans}


def worker_event(kind, worker, at, **fields):
    return {"event": kind, "time": STARTED + at, "worker": worker, **fields}


def state_events(worker, changes):
    """Reports of 0.01 s after each change: (second, state, reason)."""
    return [
        worker_event(
            "worker_state",
            worker,
            at + 0.01,
            changes=[[STARTED + at, *state]],
            until=STARTED + at + 0.01,
        )
        for at, *state in changes
    ]


def life_events():
    """Worker 0 works from second 5 to 29; worker 1 from 5 to 10, where it dies, and from 14 to 25, but for pauses."""
    return [
        *[worker_event("worker_started", worker, 1.0, attempt=0) for worker in (0, 1)],
        *[worker_event("worker_ready", worker, STARTUP_S, startup_s=4.0) for worker in (0, 1)],
        *state_events(
            0, [(5.0, "gated", "weights"), (6.0, "decoding", ""), (27.0, "gated", "bound")]
        ),
        worker_event("worker_time", 0, 29.5, until=STARTED + 29.0, seconds={}),
        *state_events(1, [(5.0, "decoding", "")]),
        worker_event("worker_died", 1, 10.0, exit_code=-9, tickets=4),
        worker_event("worker_started", 1, 10.1, attempt=1),
        worker_event("worker_ready", 1, 14.0, startup_s=3.0),
        *state_events(
            1, [(13.9, "paused", "update"), (14.1, "decoding", ""), (24.0, "starved", "round")]
        ),
        worker_event("worker_time", 1, 29.5, until=STARTED + 25.0, seconds={}),
    ]


def make_events(trajectories_per_step=32):
    """Two workers, the second of which dies in step 3 and is back in step 5; version 6 is evaluated."""
    events = life_events()
    for step in range(1, STEPS + 1):
        start = STARTUP_S + (step - 1) * STEP_S
        for i in range(trajectories_per_step):
            ticket = (step - 1) * trajectories_per_step + i
            events.append(
                trajectory(ticket, i % 2, start + 0.01 * i, 1.2 + 0.01 * (i % 7), step - 1)
            )
        for worker in (0, 1)[: 1 if 10 < start + 1.95 < 14 else 2]:
            updated = {"worker": worker, "version": step, "pause_s": 0.03}
            events.append({"event": "update", "time": STARTED + start + 1.95, **updated})
        events.append(step_event(step))
    events += [trajectory(9000 + i, i % 2, 17.0, 0.5, 6, group=-1) for i in range(4)]
    events.append({"event": "evaluation", "time": STARTED + 17.6, "version": 6, "accuracy": 0.5})
    events.append(
        trajectory(
            9100, 0, 20.0, 0.4, 7, finish_reason="failed", reward=None, failure="it </script> broke"
        )
    )
    unstarted = trajectory(9101, 1, 20.0, 0.0, 7, finish_reason="aborted", reward=None, tokens=0)
    return [*events, {k: v for k, v in unstarted.items() if not k.endswith("_version")}]


def swarm_events():
    """Machine `far` joins at second 6 and stays, with worker 2; `far.2` with worker 3 is there from 8 to 20."""
    told = {"mb_sent": 2.0, "mb_received": 0.5, "tokens_per_s": 40.0}
    events = [
        {"event": "machine_joined", "time": STARTED + 6.0, "machine": "far"},
        worker_event("worker_started", 2, 7.0, attempt=0, machine="far"),
        worker_event("worker_ready", 2, 7.0, startup_s=1.0),
        {"event": "machine_joined", "time": STARTED + 8.0, "machine": "far.2"},
        worker_event("worker_started", 3, 9.0, attempt=0, machine="far.2"),
        worker_event("worker_ready", 3, 9.0, startup_s=1.0),
        {
            "event": "machine",
            "time": STARTED + 10.0,
            "machine": "far",
            "workers": [2],
            "lag": 1.0,
            **told,
        },
        {
            "event": "machine",
            "time": STARTED + 12.0,
            "machine": "far",
            "workers": [2],
            "lag": 2.0,
            **told,
        },
        {"event": "machine", "time": STARTED + 12.0, "machine": "far.2", "workers": [3], **told},
        *[trajectory(8000 + i, 2, 11.0 + i, 0.5, 2) for i in range(3)],
        trajectory(8010, 3, 15.0, 0.5, 2, tokens=70),
        worker_event("mismatch", 0, 12.0, **{"mismatch/k3": 9.0}),
        worker_event("mismatch", 2, 12.0, **{"mismatch/k3": 1e-6}),
        worker_event("mismatch", 2, 14.0, **{"mismatch/k3": 2e-6}),
        {
            "event": "machine_left",
            "time": STARTED + 20.0,
            "machine": "far.2",
            "why": "was silent",
            "tickets": 4,
        },
        worker_event("worker_died", 3, 20.0, exit_code=None, tickets=4),
    ]
    return [*make_events(), *events]


def run_json():
    return {
        "command": ["python", "train_async.py", "--task", "a task"],
        "world_size": 2,
        "config": {
            "algo": "tis",
            "task": "addition",
            "steps": STEPS,
            "async_ratio": 2.0,
            "seed": 0,
            "gone_since": 1,
        },
        "git_commit": "0123abc",
        "git_diff": "diff --git a/x.py b/y.py\n--- a/x.py\n+++ b/y.py\n-one\n+two\n+three",
        "packages": {"torch": "9.9"},
        "python": "3.11.0",
        "hardware": {"cpu_cores": 2, "cpu": "Some CPU", "gpus": ["H200", "H200"]},
        "started_at": "2023-11-14T22:13:20+0000",
    }


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "my run"
    path.mkdir()
    (path / "run.json").write_text(json.dumps(run_json()))
    write_lines(path / "metrics.jsonl", [metrics_line(step) for step in range(1, STEPS + 1)])
    write_lines(path / "events.jsonl", make_events())
    samples = [
        {"step": step, "prompt": f"what {step}?", "response": HOSTILE, "reward": 1.0}
        for step in range(1, 31)
    ]
    write_lines(path / "samples.jsonl", samples)
    return path


def timeline_of(run):
    return build_timeline(load(run))


def timeline_of_events(path, events):
    """The timeline of a run that has one step and wrote these events."""
    (path / "run.json").write_text(json.dumps(run_json()))
    write_lines(path / "metrics.jsonl", [metrics_line(1)])
    write_lines(path / "events.jsonl", events)
    return timeline_of(path)


def page_of(run, now=STARTED + 10_000):
    return report.make_page(load(run), timeline_of(run), now)


def table(page, title):
    rows = next(table["rows"] for table in page["tables"] if title in table["title"])
    return {name: numbers for name, *numbers in rows}


def curves(page):
    return {
        chart["title"]: {s["name"]: s["points"] for s in chart["series"]}
        for chart in page["charts"]
    }


class Text(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.scripts = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        (self.scripts if self.tags and self.tags[-1][0] == "script" else self.texts).append(text)


def html_of(run):
    report.write_report(load(run), with_trace=False)
    return (run / "report.html").read_text()


def run_script(*arguments):
    command = [sys.executable, ROOT / "scripts/report.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# Page


def test_the_header_says_what_was_run_on_what_and_how_it_differs_from_the_default_job(run):
    facts = page_of(run)["facts"]
    assert facts["command"] == "python train_async.py --task 'a task'"
    assert facts["options"] == "algo = tis, steps = 12, async_ratio = 2, gone_since = 1"
    assert facts["commit"] == "0123abc, dirty: +2 −1 lines in y.py (see run.json)"
    assert facts["hardware"] == "2 CPU cores (Some CPU), 2 × H200; 2 trainer ranks"
    assert facts["packages"] == "torch 9.9, Python 3.11.0"
    assert facts["outcome"] == "finished: all 12 steps; worker deaths: 1"
    assert facts["started"].endswith(
        "lasted 0:00:30, 0:00:05 of it before the first step and 0:00:00 after the last"
    )


def test_no_option_of_a_run_with_all_defaults_is_listed_as_changed():
    from asyncrl.config import Config

    as_written = json.loads(json.dumps(Config().as_dict()))
    assert report.changed_options(as_written) == ""
    assert (
        report.changed_options(as_written | {"algo_args": ["clip_high=0.3"]})
        == "algo_args = clip_high=0.3"
    )


def test_the_numbers_are_those_of_the_summary(run):
    numbers = page_of(run)["numbers"]
    assert (
        numbers["reward, last tenth"] == "0.600" and numbers["held-out accuracy, last"] == "1.000"
    )
    assert numbers["share of time the trainer waited"] == "40.0%"


def test_there_is_a_curve_per_metric_and_lag_bucket_and_a_word_on_those_that_are_missing(run):
    page = page_of(run)
    series = curves(page)
    over_samples = series["Reward and held-out accuracy over samples"]
    assert (
        over_samples["held-out accuracy"] == [(192, 0.5), (384, 1.0)]
        and len(over_samples["reward"]) == STEPS
    )
    assert series["Reward and held-out accuracy over time"]["held-out accuracy"] == [
        (12.0, 0.5),
        (24.0, 1.0),
    ]
    assert list(series["Clip fraction by lag, steps"]) == ["lag 0", "lag 1", "lag 9+"]
    assert len(series["Clip fraction by lag, steps"]["lag 1"]) == STEPS - 1
    assert (
        "Effective sample size by lag, steps" in page["missing"]
        and "Entropy, nats per token" not in page["missing"]
    )
    assert re.search("Not recorded by this run: .*Effective sample size by lag", html_of(run))


def test_what_people_look_at_first_has_curves(run):
    first = {
        "response/length_mean": 9.0, "response/length_max": 20, "loss/grad_norm": 0.5, "loss/total": 0.01,
        "drift/k3": 0.001, "mismatch/k3": 1e-7, "rollout/tokens_per_s": 500.0, "reward/zero_variance_groups": 0.25,
        "time/step_s": 2.5, "time/wait_s": 0.75, "time/train_s": 1.25, "time/publish_s": 0.125,
    }  # fmt: skip
    write_lines(run / "metrics.jsonl", [metrics_line(step) | first for step in range(1, STEPS + 1)])
    drawn = [points for lines in curves(page_of(run)).values() for points in lines.values()]
    for value in first.values():
        assert [(float(step), value) for step in range(1, STEPS + 1)] in drawn


def test_named_parts_of_the_reward_have_a_chart_where_a_reward_has_parts(run):
    assert not any("Parts of the reward" in title for title in curves(page_of(run)))
    parts = {
        "reward/std": 0.5,
        "reward/zero_variance_groups": 0.0,
        "reward/format": 0.25,
        "reward/check.right": 1.0,
    }
    write_lines(run / "metrics.jsonl", [metrics_line(step) | parts for step in (1, 2)])
    drawn = curves(page_of(run))["Parts of the reward, mean"]
    assert drawn == {"format": [(1.0, 0.25), (2.0, 0.25)], "check.right": [(1.0, 1.0), (2.0, 1.0)]}


def test_the_ledgers_sum_to_what_was_issued_and_generated(run):
    page = page_of(run)
    groups, tokens = table(page, "groups"), table(page, "tokens")
    assert groups["issued"] == ["111", "100.0%"] and groups["dropped: stale"] == ["12", "10.8%"]
    assert tokens["generated"] == ["4320", "100.0%"] and tokens["consumed"] == ["3840", "88.9%"]
    for ledger in (groups, tokens):
        *parts, total = [int(count) for count, _ in ledger.values()]
        assert sum(parts) == total


def test_the_trainers_time_sums_to_that_of_its_steps(run):
    spent = table(page_of(run), "trainer's time")
    assert list(spent) == ["wait", "forward_backward", "publish", "other", "all steps"]
    assert spent["wait"] == ["9.60", "40.0%"] and spent["other"] == ["1.20", "5.0%"]
    *parts, total = [float(seconds) for seconds, _ in spent.values()]
    assert sum(parts) == pytest.approx(total) and total == STEPS * STEP_S


def test_the_workers_time_sums_to_their_lives_by_state_and_reason(run):
    spent = table(page_of(run), "workers' time")
    assert {state: float(seconds) for state, (seconds, *_) in spent.items()} == {
        "decoding": 21 + 5 + 9.9, "starting": 4 + 4, "restarting": 3.9, "gated: bound": 2, "gated: weights": 1,
        "starved: round": 1, "paused: update": 0.2, "all workers": 28 + 24,
    }  # fmt: skip
    assert spent["restarting"][1:] == ["7.5%", "0.0% … 16.3%"]


def test_one_worker_alone_has_no_range_over_workers(run):
    write_lines(
        run / "events.jsonl", [event for event in make_events() if event.get("worker") != 1]
    )
    spent = table(page_of(run), "workers' time")
    assert spent["all workers"] == ["28.00", "100.0%"] and "…" not in str(spent)


def test_the_page_says_what_each_state_means_that_occurs(run):
    page = page_of(run)
    trainer, workers = (
        next(t for t in page["tables"] if f"{who} time" in t["title"])
        for who in ("trainer's", "workers'")
    )
    assert list(trainer["meanings"]) == ["wait", "forward_backward", "publish", "other"]
    assert set(workers["meanings"]) == {
        "starting",
        "decoding",
        "starved",
        "gated",
        "paused",
        "restarting",
    }
    assert "nothing to run" in html_of(run) and "writes metrics" in html_of(run)


def test_a_run_without_time_ledgers_has_a_page_without_them(run):
    lines = [
        {k: v for k, v in metrics_line(step).items() if "_time/" not in k} for step in range(1, 4)
    ]
    write_lines(run / "metrics.jsonl", lines)
    write_lines(
        run / "events.jsonl", [e for e in make_events() if e["event"] != "worker_state"][2:]
    )
    page = page_of(run)
    assert not any("time went" in table["title"] for table in page["tables"])
    assert "Trainer's time, share of each step" in page["missing"]


def test_red_on_the_page_means_failed_and_no_state(run):
    (failed,) = re.findall('FAILED = "(.*?)"', html_of(run))
    assert failed not in STATE_COLORS.values()


def test_samples_are_spread_over_the_run(run):
    assert report.NUM_SAMPLES == 30
    samples = [{"step": step, "prompt": "", "response": "", "reward": 1.0} for step in range(1, 60)]
    write_lines(run / "samples.jsonl", samples)
    assert [sample["step"] for sample in page_of(run)["samples"]] == list(range(1, 60, 2))


def test_of_a_group_the_best_and_the_worst_member_are_shown_with_the_right_answer(run):
    rewards = [0.5, 1.0, 0.0, None]
    members = [
        {"step": 1, "group": 7, "prompt": "2+2", "response": f"{r}", "reward": r, "answer": "4"}
        for r in rewards
    ]
    alike = [{"step": 2, "group": 8, "prompt": "1+1", "response": "2", "reward": 1.0}] * 2
    write_lines(run / "samples.jsonl", members[:3] + alike)
    best, worst, one = page_of(run)["samples"]
    assert (best["response"], worst["response"], one["response"]) == ("1.0", "0.0", "2")
    assert (best["of its group"], best["right answer"]) == (
        "best",
        "4",
    ) and "right answer" not in one
    assert '<pre class="answer">4</pre>' in html_of(run)
    write_lines(run / "samples.jsonl", members)
    assert page_of(run)["samples"][1]["response"] == "None"


def test_what_a_run_has_written_is_text_and_never_markup(run):
    html = html_of(run)
    page = Text(html)
    assert html.count("</script>") == 2 and [tag for tag, _ in page.tags].count("script") == 2
    assert not any(tag == "img" for tag, _ in page.tags)
    assert page.texts.count(HOSTILE) == 30
    data = json.loads(page.scripts[0])
    assert any(
        "it </script> broke" in bar
        for lane in data["timeline"]["lanes"]
        for bar in lane["trajectories"]
    )


def test_the_page_needs_nothing_but_itself(run):
    html = html_of(run)
    assert "default-src 'none'" in html and not re.search(r"{%", html)
    for _, attributes in Text(html).tags:
        assert "src" not in attributes and attributes.get("href", "data:").startswith("data:")


def test_a_short_run_with_one_step_and_nothing_else_has_a_page(run):
    write_lines(run / "metrics.jsonl", [metrics_line(1)])
    (run / "events.jsonl").unlink()
    (run / "samples.jsonl").unlink()
    html = html_of(run)
    assert "No sample has been recorded" in html and re.search(
        "Not recorded by this run: Held-out accuracy; .*Effective sample size.*; Timeline[.]", html
    )


# Several runs


@pytest.fixture
def other(run):
    """A run beside it, with seed 1, which has made 4 steps and earns half as much."""
    other = shutil.copytree(run, run.parent / "other")
    config = run_json()["config"] | {"seed": 1}
    (other / "run.json").write_text(json.dumps(run_json() | {"config": config}))
    lines = [metrics_line(step) | {"reward/mean": step / 40} for step in range(1, 5)]
    write_lines(other / "metrics.jsonl", lines)
    return other


def test_several_runs_have_one_page_with_how_they_differ_and_a_line_each_in_every_chart(run, other):
    page = report.make_comparison([load(run), load(other)])
    assert page["facts"] == {
        "my run": "seed = 0, 12 of 12 steps",
        "other": "seed = 1, 4 of 12 steps",
    }
    drawn = curves(page)
    rewards = drawn["Reward and held-out accuracy over samples: reward"]
    assert rewards["my run"][:2] == [(32.0, 0.05), (64.0, 0.1)] and rewards["other"][-1] == (
        128.0,
        0.1,
    )
    assert list(drawn["Reward and held-out accuracy over samples: held-out accuracy"]) == ["my run"]
    assert (
        drawn["Entropy, nats per token"].keys()
        == {"my run", "other"}
        == drawn["Staleness of trajectories, steps: max"].keys()
    )
    assert len(drawn["Trainer's time, share of each step: wait"]["other"]) == 4
    colors = {
        (series["name"], series["color"]) for chart in page["charts"] for series in chart["series"]
    }
    assert len(colors) == 2, "a run has one colour"
    assert table(page, "look at first")["held-out accuracy, last"] == ["1.000", "–"]
    assert {sample["run"] for sample in page["samples"]} == {"my run", "other"}


def test_the_page_of_several_runs_is_written_into_the_first_and_is_text_and_never_markup(
    run, other
):
    result = run_script(run, other)
    assert result.stdout.endswith(f"comparison: {run / 'comparison.html'}\n"), result.stderr
    printed = [line.split() for line in result.stdout.splitlines()]
    assert printed[:2] == [["my", "run", "other"], ["steps", "12", "4"]]
    assert ["held-out", "accuracy,", "last", "1.000", "-"] in printed
    html = (run / "comparison.html").read_text()
    page = Text(html)
    assert html.count("</script>") == 2 and not any(tag == "img" for tag, _ in page.tags)
    assert "Ledgers" not in page.texts and "2 runs" in page.texts
    assert run_script(run, other, "--trace").stderr.endswith(
        "--trace is of one run; leave it out, or give one\n"
    )


# Timeline and trace


def test_there_is_a_lane_for_the_trainer_the_evaluations_and_each_worker(run):
    lanes = {lane.name: lane for lane in timeline_of(run).lanes}
    assert list(lanes) == ["trainer", "evaluation", "worker 0", "worker 1"]
    assert sum(bar.kind == "step" for bar in lanes["trainer"].bars) == STEPS
    assert {bar.kind for bar in lanes["trainer"].bars} == {
        "step",
        "wait",
        "forward_backward",
        "publish",
        "other",
    }
    (evaluation,) = lanes["evaluation"].bars
    assert (evaluation.start, evaluation.end) == (pytest.approx(17.0), pytest.approx(17.6))
    assert evaluation.details == {"version": 6, "responses": 4, "accuracy": 0.5}
    trajectories = [bar for lane in lanes.values() for bar in lane.bars if bar.kind == "trajectory"]
    assert len(trajectories) == STEPS * 32 + 6
    assert sum(bar.kind == "update" for bar in lanes["worker 0"].bars) == STEPS


def test_workers_of_other_nodes_have_lanes_of_their_own_with_the_same_bars(run):
    lanes = {lane.name: lane for lane in timeline_of(run).lanes}
    here = [event for event in make_events() if event.get("worker") != 1]
    there = [event | {"worker": 0} for event in make_events() if event.get("worker") == 1]
    write_lines(run / "events.jsonl", here)
    (run / "node_1").mkdir()
    write_lines(run / "node_1" / "events.jsonl", [*there, step_event(1)])
    of_nodes = {lane.name: lane for lane in timeline_of(run).lanes}
    assert list(of_nodes) == ["trainer", "evaluation", "worker 0", "worker 1.0"]
    assert of_nodes["trainer"].bars == lanes["trainer"].bars
    assert (
        of_nodes["worker 1.0"].bars == lanes["worker 1"].bars
        and of_nodes["worker 0"].bars == lanes["worker 0"].bars
    )
    assert "worker deaths: 1" in page_of(run)["facts"]["outcome"]


def test_an_evaluation_has_its_last_response_also_where_it_ends_within_its_millisecond(tmp_path):
    of_first = [[i, -1, i, 0, [1000 * (i + 1), 999, 0], 10, "stop", 1.0, 0, 0] for i in range(3)]
    of_second = [[i, -1, i, 0, [1000 * (i + 5), 500, 0], 10, "stop", 1.0, 1, 1] for i in range(2)]
    first, second = (
        {"event": "evaluation", "time": STARTED + at, "accuracy": 0.5} for at in (3.9998, 7.0)
    )
    columns = [
        "ticket",
        "group",
        "member",
        "worker",
        "times_ms",
        "tokens",
        "finish_reason",
        "reward",
        "min_version",
    ]
    legend = {
        "trajectory_lines": {"since": STARTED, "columns": [*columns, "max_version", "failure"]}
    }
    events = [{"event": "run_started", "time": STARTED} | legend]
    events += [*of_first, first | {"version": 0}, *of_second, second | {"version": 1}]
    bars = timeline_of_events(tmp_path, events).lanes[1].bars
    assert [bar.details["responses"] for bar in bars] == [3, 2]


def test_two_evaluations_of_one_version_are_two_bars_and_one_that_did_not_end_is_one(tmp_path):
    evaluations = [
        *[trajectory(i, 0, 1.0, 2.0, 0, group=-1) for i in range(3)],
        {"event": "evaluation", "time": STARTED + 3.1, "version": 0, "accuracy": 0.25},
        trajectory(3, 0, 5.0, 2.0, 0, group=-1),
        {"event": "evaluation", "time": STARTED + 7.1, "version": 0, "accuracy": None},
        trajectory(4, 0, 9.0, 2.0, 1, group=-1),
    ]
    lane = timeline_of_events(tmp_path, evaluations).lanes[1]
    assert [(round(bar.start, 3), round(bar.end, 3)) for bar in lane.bars] == [
        (1, 3.1),
        (5, 7.1),
        (9, 11),
    ]
    assert [tuple(bar.details.values()) for bar in lane.bars] == [
        (0, 3, 0.25),
        (0, 1, None),
        (1, 1, None),
    ]


def test_a_workers_lane_shows_its_states_its_starts_and_its_death(run):
    lane = timeline_of(run).lanes[3]
    states = [
        (bar.kind, round(bar.start, 6), round(bar.end, 6)) for bar in lane.bars if bar.row == 0
    ]
    assert states == [
        ("starting", 1, 5), ("decoding", 5, 10), ("restarting", 10, 13.9), ("paused", 13.9, 14.1),
        ("decoding", 14.1, 24), ("starved", 24, 25),
    ]  # fmt: skip
    assert [(mark.kind, mark.start) for mark in lane.marks] == [
        ("started", 5.0),
        ("started", 14.0),
        ("died", 10.0),
    ]


def test_a_worker_that_never_came_back_is_restarting_to_the_end(tmp_path):
    events = make_events()
    events = [e for e in events if e.get("worker") != 1 or e["time"] < STARTED + 13]
    timeline = timeline_of_events(tmp_path, events)
    last = [bar for bar in timeline.lanes[3].bars if bar.row == 0][-1]
    assert (last.kind, last.start, last.end) == ("restarting", 10.0, timeline.duration)


def test_machines_that_join_have_a_lane_with_their_number_and_each_of_their_workers_has_one(run):
    write_lines(run / "events.jsonl", swarm_events())
    lanes = {lane.name: lane for lane in timeline_of(run).lanes}
    own = ["worker 0", "worker 1"]
    assert list(lanes) == [
        "trainer",
        "evaluation",
        "machines",
        *own,
        "worker 2 (far)",
        "worker 3 (far.2)",
    ]
    there = [(bar.name, round(bar.start, 3), round(bar.end, 3)) for bar in lanes["machines"].bars]
    assert there == [("1 there", 6, 8), ("2 there", 8, 20), ("1 there", 20, 29.5)]
    marks = [(mark.kind, mark.name, *mark.details.values()) for mark in lanes["machines"].marks]
    assert marks == [
        ("joined", "far joined"), ("joined", "far.2 joined"), ("left", "far.2 left", "was silent", 4),
    ]  # fmt: skip
    far, away = lanes["worker 2 (far)"], lanes["worker 3 (far.2)"]
    assert [(bar.kind, bar.start, bar.end) for bar in away.bars if bar.row == 0] == [
        ("away", 9, 20)
    ]
    assert [(bar.kind, bar.end) for bar in far.bars if bar.row == 0] == [("away", 29.5)]
    assert [(mark.kind, mark.start) for mark in away.marks] == [("joined", 9), ("left", 20)]
    assert sum(bar.kind == "trajectory" for bar in far.bars) == 3


def test_machines_that_join_have_no_part_in_the_workers_time_and_their_leaving_is_no_death(run):
    spent = table(page_of(run), "workers' time")
    write_lines(run / "events.jsonl", swarm_events())
    page = page_of(run)
    assert table(page, "workers' time") == spent
    suffix = "worker deaths: 1; machines that joined: 2, that left before the end: 1"
    assert page["facts"]["outcome"] == f"finished: all 12 steps; {suffix}"


def test_what_each_machine_did_has_a_row_and_curves_those_that_sampled_most_first(run):
    write_lines(run / "events.jsonl", swarm_events())
    lines = [metrics_line(step) | {"swarm/machines": step // 3} for step in range(1, STEPS + 1)]
    write_lines(run / "metrics.jsonl", lines)
    page = page_of(run)
    (found,) = (table for table in page["tables"] if "machines" in table["title"])
    columns = (
        "machine",
        "there, s",
        "responses",
        "tokens",
        "tokens/s",
        "lag",
        "MB sent",
        "MB received",
        "mismatch, k3",
    )
    assert found["headings"] == [*columns, "why it left"]
    assert found["rows"] == [
        ["far.2", "12.0", "1", "70", "5.8", "", "2.0", "0.5", "nan", "was silent"],
        ["far", "8.0", "3", "30", "3.8", "1.50", "4.0", "1.0", "2e-06", ""],
        ["all 2", "14.0", "4", "100", "7.1", "1.50", "6.0", "1.5", "2e-06", ""],
    ]
    drawn = curves(page)
    assert drawn["Generated tokens/s, by machine"] == {
        "far.2": [(12.0, 40.0)],
        "far": [(10.0, 40.0), (12.0, 40.0)],
    }
    (lag,) = (
        lines
        for title, lines in drawn.items()
        if title.startswith("Versions that responses were behind")
    )
    assert lag == {"far": [(10.0, 1.0), (12.0, 2.0)]}
    (mismatch,) = (lines for title, lines in drawn.items() if title.startswith("Mismatch with"))
    assert mismatch == {"far": [(12.0, 1e-6), (14.0, 2e-6)]}
    assert drawn["Machines that have joined"]["machines"][-1] == (12.0, 4.0)
    assert '<section class="card wide"><h3>What machines did that joined' in html_of(run)


def test_a_run_that_no_machine_joined_says_nothing_of_machines(run):
    page = page_of(run)
    assert not any("machine" in table["title"] for table in page["tables"])
    assert not any("machine" in chart["title"] for chart in page["charts"])


def test_each_reason_of_the_ledger_is_named_in_words(run):
    write_lines(run / "metrics.jsonl", [metrics_line(1) | {"ledger/groups_dropped_shut_out": 2}])
    assert table(page_of(run), "groups")["dropped: shut out"][0] == "2"


def test_bars_of_one_row_never_overlap(run):
    write_lines(run / "events.jsonl", swarm_events())
    for lane in timeline_of(run).lanes:
        for row in range(lane.num_rows):
            bars = sorted((bar.start, bar.end) for bar in lane.bars if bar.row == row)
            assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(bars))


def test_spans_are_packed_into_as_few_rows_as_overlap():
    assert pack([(0, 4), (1, 2), (2, 3), (2.5, 5), (4, 6)]) == [0, 1, 1, 2, 0]
    assert pack([]) == []


def test_the_trace_has_the_keys_of_the_chrome_format_and_the_same_lanes(run):
    result = run_script(run, "--trace")
    assert result.stdout.endswith(
        f"report: {run / 'report.html'}\ntrace: {run / 'trace.json'}\n"
    ), result.stderr
    written = json.loads((run / "trace.json").read_text())
    assert written == json.loads(json.dumps(trace(timeline_of(run))))
    for event in written["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= event.keys() and event["ph"] in "XMi"
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "i" or event["s"] == "p"
    names = {e["args"]["name"] for e in written["traceEvents"] if e["name"] == "process_name"}
    assert names == {"trainer", "evaluation", "worker 0", "worker 1"}
    assert sum(e.get("cat") == "trajectory" for e in written["traceEvents"]) == STEPS * 32 + 6


# Runs that are going on, and mistakes


def test_a_run_that_is_going_on_or_was_killed_has_a_report_without_the_half_written_line(run):
    write_lines(run / "metrics.jsonl", [metrics_line(1), metrics_line(2)])
    for name in ("metrics", "events"):
        with open(run / f"{name}.jsonl", "a") as file:
            file.write('{"event": "traj')
    end = STARTED + timeline_of(run).duration
    assert page_of(run, end + 7)["facts"]["outcome"].startswith(
        "still going, or ended just now: 2 of 12 steps"
    )
    assert page_of(run, end + 600)["facts"]["outcome"].startswith("ended early: 2 of 12 steps")
    assert (
        page_of(run)["facts"]["left out"]
        == "the last line of metrics.jsonl, events.jsonl, which is half written"
    )


def test_what_ended_a_run_early_is_said_and_no_advice_that_its_few_steps_cannot_give(run):
    write_lines(run / "metrics.jsonl", [metrics_line(1), metrics_line(2)])
    ended = {
        "event": "run_ended",
        "time": STARTED + 40,
        "status": "ended early",
        "reason": "Interrupted: stopped",
    }
    write_lines(run / "events.jsonl", [*make_events(), ended])
    facts = page_of(run)["facts"]
    assert facts["outcome"] == "ended early: 2 of 12 steps; Interrupted: stopped; worker deaths: 1"
    assert "advice" not in facts


def test_the_advice_on_devices_is_said_where_extras_planning_is_there(run, monkeypatch):
    events = make_events()
    for event in events:
        if event["event"] == "step":
            event["groups"] = [*range(8 * event["step"] - 8, 8 * event["step"])]
    write_lines(run / "events.jsonl", events)
    (run / "run.json").write_text(json.dumps(run_json() | {"world_size": 1}))
    # Decoding takes 1.5 s and the longest response 1.26 s: (1.5 + 1.26/3) / (1.5 + 1.26/5) = 1.10.
    assert page_of(run)["facts"]["advice"].startswith("--async-ratio 4: predicted 1.10×")
    monkeypatch.setitem(extras.MODULES, "advice", "extras.nowhere.advice")
    assert "advice" not in page_of(run)["facts"]


def test_the_script_ends_with_one_line_and_a_status(tmp_path):
    result = run_script(tmp_path / "none")
    assert result.returncode == 1 and result.stdout == ""
    assert re.fullmatch(
        "error: .*none/metrics.jsonl does not exist; give the directory of a run.*\n", result.stderr
    )


# In a browser

LISTEN = """<script>
const problems = [];
addEventListener("error", (event) => problems.push(event.message));
console.error = console.warn = (...words) => problems.push(words.join(" "));
</script>"""
PROBE = """<script>
function colorsDrawn() {
  const { width, height } = canvas, pixels = pen.getImageData(0, 0, width, height).data, colors = new Set();
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3]) colors.add(pixels.slice(i, i + 3).join());
  return [...colors];
}
function point(type, x, y) {
  const { left, top } = canvas.getBoundingClientRect();
  const place = { clientX: left + x, clientY: top + y, deltaY: -300, bubbles: true, cancelable: true };
  canvas.dispatchEvent(new (type === "wheel" ? WheelEvent : PointerEvent)(type, place));
}
setTimeout(() => {
  const whole = [view.start, view.end], tops = laneTops(), lane = lanes[2], bar = lane.byRow[2][0];
  const drawStart = performance.now();
  draw();
  const charts = Array.from(document.querySelectorAll("#charts figure"), (f) => f.querySelectorAll("polyline").length);
  const short = [0, 8e-6, -2e-5, 3 * 2e-6, 0.00015, 0.5, 12345].map(shortNumber);
  const seen = { short, problems, whole, charts, colors: colorsDrawn(), draw_ms: performance.now() - drawStart };
  point("pointermove", toX((bar[1] + bar[2]) / 2), AXIS + tops[2] - view.top + rowTop(lane, 2) + 1);
  seen.tip = tip.textContent;
  point("wheel", 500, 100);
  seen.zoomed = [view.start, view.end];
  document.getElementById("least").value = "0.5";
  document.getElementById("filter").dispatchEvent(new Event("input"));
  seen.shown = document.querySelectorAll(".sample:not([hidden])").length;
  seen.count = document.getElementById("count").textContent;
  document.querySelector("button[data-act=all]").click();
  seen.again = [view.start, view.end];
  document.body.dataset.seen = JSON.stringify(seen);
}, 300);
</script>"""


def open_in_browser(run, browser, lane=2):
    """What the probe saw in the page, opened from disk, and the browser's log; `lane` is one of a worker."""
    html, probe = (
        html_of(run),
        PROBE.replace("lanes[2]", f"lanes[{lane}]").replace("tops[2]", f"tops[{lane}]"),
    )
    page = run / "probed.html"
    page.write_text(
        html.replace("<head>", "<head>" + LISTEN, 1).replace("</body>", probe + "</body>")
    )
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={run / 'profile'}",
    ]
    options = [
        "--enable-logging=stderr",
        "--window-size=1200,2000",
        "--virtual-time-budget=2000",
        "--dump-dom",
    ]
    result = subprocess.run(
        [*command, *options, page.as_uri()], capture_output=True, text=True, timeout=60
    )
    body = next((attributes for tag, attributes in Text(result.stdout).tags if tag == "body"), {})
    assert "data-seen" in body, (
        f"the page's script did not run to its end:\n{result.stderr[-3000:]}"
    )
    return json.loads(body["data-seen"]), result.stderr


def test_a_browser_draws_a_run_that_machines_joined(run):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser of {', '.join(BROWSERS)} is installed")
    write_lines(run / "events.jsonl", swarm_events())
    seen, log = open_in_browser(run, browser, lane=3)
    assert seen["problems"] == [] and "CONSOLE" not in log
    assert "201,220,201" in seen["colors"] and "194,87,26" in seen["colors"], (
        "machines and a leave are not there"
    )


def test_a_browser_draws_the_timeline_zooms_it_and_names_what_is_under_the_pointer(run):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser of {', '.join(BROWSERS)} is installed")
    rewards = [0.0, 0.5, 1.0, None]
    samples = [
        {"step": 1, "group": i, "prompt": "", "response": "", "reward": r}
        for i, r in enumerate(rewards)
    ]
    write_lines(run / "samples.jsonl", samples)
    seen, log = open_in_browser(run, browser)
    assert (seen["shown"], seen["count"]) == (2, "2 of 4"), "those with a reward from 0.5 on"
    assert seen["short"] == ["0", "8e-6", "-2e-5", "6e-6", "0.00015", "0.5", "12.35k"]
    assert seen["problems"] == [] and "CONSOLE" not in log
    assert seen["charts"] == [len(chart["series"]) for chart in page_of(run)["charts"]]
    assert "47,111,181" in seen["colors"] and len(seen["colors"]) > STEPS, (
        "phases and versions are not there"
    )
    assert "ticket: 0\ngroup: 0\nmember: 0\ntokens: 10\nmin version: 0" in seen["tip"]
    assert "reward: 1\nfinish reason: stop" in seen["tip"]
    (start, end), (left, right) = seen["whole"], seen["zoomed"]
    assert start == 0 and start < left < right < end and seen["again"] == seen["whole"]
