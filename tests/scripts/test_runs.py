"""The reader of runs, on a recorded one and on a directory that is written here as a run writes it."""

import gzip
import json
import math
from pathlib import Path

import pytest
from user_files import write_jsonl

from scripts.runs import evaluations, failures, frame, load, names, progress, summarise

RECORDED = Path(__file__).parents[2] / "results/smollm2/one_digit-s0"


def trajectory(ticket, time, **more):
    return {"event": "trajectory", "time": time, "ticket": ticket, "worker": 0, **more}


@pytest.fixture
def path(tmp_path):
    run = tmp_path / "some" / "run"
    write_jsonl(run / "metrics.jsonl", [{"step": 1}])
    write_jsonl(run / "events.jsonl", [trajectory(3, 1.0, oldest_version=2), trajectory(4, 3.0)])
    for node in (10, 2):
        write_jsonl(run / f"node_{node}" / "events.jsonl", [trajectory(node, 2.0)])
    sample = '{"step": 1, "prompt": "p\u2028\u0085q"}\n'  # a response can have these ends of lines
    (run / "samples.jsonl").write_text(sample, encoding="utf-8")
    (run / "run.json").write_text(json.dumps({"config": {"algo": "grpo"}}))
    return run


def test_a_missing_run_is_an_error_with_the_nearest_name(path):
    with pytest.raises(ValueError, match=rf"runz/metrics.jsonl .*; did you mean {path}\?$"):
        load(f"{path.parent}/runz")


def test_the_error_for_a_run_without_a_step_has_the_reason_of_its_end(path):
    (path / "metrics.jsonl").write_text("")
    ends = [{"event": "run_ended", "reason": reason} for reason in ("", "RuntimeError: 13 failed")]
    for events, text in (
        (ends[:1], "wait for it, or see worker"),
        (ends, "ended by RuntimeError: 13 failed$"),
    ):
        write_jsonl(path / "events.jsonl", events)
        with pytest.raises(ValueError, match=f"metrics.jsonl is empty.*; .*{text}"):
            load(path)


def test_events_are_frames_by_kind_whose_ids_stay_whole_numbers(path):
    resumed = load(RECORDED).metrics[10:]
    assert progress(resumed)["samples"].iloc[0] == 640
    assert math.isnan(summarise(resumed.drop(columns="time/wait_s"))["wait_share"])
    run = load(path)
    assert run.name == "run" and run.info == {"config": {"algo": "grpo"}}
    assert names([run]) == ["run"] and names([run, run]) == [str(path)] * 2
    responses = run.events["trajectory"]
    assert [*run.events] == ["trajectory"] and run.events["worker_died"].empty
    assert responses[["ticket", "node"]].to_numpy().tolist() == [[3, 0], [2, 2], [10, 10], [4, 0]]
    assert responses["oldest_version"].dtype == "Int64" and responses["oldest_version"].count() == 1
    # What is half written, by a run that still trains or was killed, is left out; a file may be packed.
    for name in ("metrics.jsonl", "node_2/events.jsonl", "samples.jsonl"):
        with open(path / name, "a") as file:
            file.write('{"step": 2')
    packed = gzip.compress((path / "events.jsonl").read_bytes())
    (path / "events.jsonl.gz").write_bytes(packed)
    (path / "events.jsonl").unlink()
    again = load(path)
    assert again.records == run.records and again.samples["prompt"].tolist() == ["p\u2028\u0085q"]
    assert len(again.metrics) == 1
    assert frame([{"a": None, "b": [1]}, {"b": [2]}]).columns.tolist() == ["a", "b"]


def test_a_line_has_all_evaluations_that_ended_in_its_step(path):
    expected = {0: 0.25, 1: 0.75, 2: 0.5, 3: 1.0}
    ended = [{"eval/policy_version": v, "eval/accuracy": a} for v, a in expected.items()]
    lines = [
        {"step": 1},
        {"step": 2} | ended[2] | {"eval/earlier": ended[:2]},
        {"step": 3} | ended[3],
    ]
    write_jsonl(path / "metrics.jsonl", lines)
    assert [*evaluations(load(path).metrics).items()] == [*expected.items()]


def test_failures_of_training_and_of_evaluations_are_told_apart(path):
    fields = {"rollout/failed_groups": 0.2, "ledger/groups_dropped_failed": 2}
    write_jsonl(path / "metrics.jsonl", [{"step": 1}, {"step": 2} | fields])
    reasons = [("stop", ""), ("failed", "judge is down"), ("aborted", ""), ("length", "")]
    events = [
        trajectory(i, i, group=group, finish_reason=reason, failure=failure)
        for group in (7, -1)
        for i, (reason, failure) in enumerate(reasons[: 4 if group > 0 else 2])
    ]
    write_jsonl(path / "events.jsonl", events)
    for node in (10, 2):
        write_jsonl(path / f"node_{node}" / "events.jsonl", [])
    often = "failed; most often (1): judge is down"
    assert failures(load(path)) == {
        "failures": f"2 of 10 groups (20.0%) and 1 of 3 responses (33.3%) {often}",
        "failures in evaluations": f"1 of 2 responses (50.0%) {often}",
    }
