"""The reader of runs, on directories written here as a run writes them."""

import gzip
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from asyncrl.config import Config, OptimOptions
from scripts.runs import evaluations, frame, load, names, progress, rows, summarise, todays_options

ROOT = Path(__file__).parents[2]
INFO = {"config": {"algo": "grpo"}}


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def step_line(step, **more):
    """Four samples, 2 s of which 0.5 s waiting and 100 tokens a step; from the second step on one step stale."""
    line = {
        "step": step,
        "samples": 4 * step,
        "reward/mean": step / 20,
        "staleness/mean": float(step > 1),
    }
    line |= {
        "staleness/max": int(step > 1),
        "time/step_s": 2.0,
        "time/wait_s": 0.5,
        "tokens/generated": 100 * step,
    }
    return line | more


def trajectory(ticket, **more):
    return {"event": "trajectory", "time": 1.0, "ticket": ticket, "worker": 0, **more}


@pytest.fixture
def path(tmp_path):
    run = tmp_path / "some" / "run"
    lines = [step_line(step) for step in range(1, 21)]
    lines[0] |= {"eval/accuracy": None, "eval/policy_version": 0}
    lines[1] |= {"eval/accuracy": 0.25, "eval/policy_version": 0}
    lines[11] |= {"eval/accuracy": 0.875, "eval/policy_version": 10}
    lines[19] |= {"eval/accuracy": 0.75, "eval/policy_version": 20}
    write_lines(run / "metrics.jsonl", lines)
    (run / "run.json").write_text(json.dumps(INFO))
    return run


def test_events_are_frames_by_kind_whose_ids_are_whole_numbers_also_where_some_are_missing(path):
    events = [
        trajectory(3, min_version=2, reward=1.0),
        trajectory(4),
        {"event": "run_ended", "time": 2.0},
    ]
    write_lines(path / "events.jsonl", events)
    run = load(path)
    assert (
        run.name == "run" and run.info == INFO and sorted(run.events) == ["run_ended", "trajectory"]
    )
    responses = run.events["trajectory"]
    assert responses["ticket"].tolist() == [3, 4] and str(responses["min_version"].dtype) == "Int64"
    assert (
        json.dumps(rows(responses)[0]["min_version"]) == "2"
        and "min_version" not in rows(responses)[1]
    )
    assert len(run.events["worker_died"]) == 0 and "worker_died" not in run.events


def test_trajectories_that_older_runs_wrote_as_lists_are_the_same_rows(path):
    event = trajectory(
        3, group=1, member=0, started_at=1.5, ended_at=2.25, turns=[[1.5, 2.0, 2.25]], tokens=4
    )
    event |= {
        "time": 2.5,
        "finish_reason": "stop",
        "reward": 0.5,
        "min_version": 2,
        "max_version": 2,
    }
    start = {"event": "run_started", "time": 1.0}
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
    legend = {"trajectory_lines": {"since": 1.0, "columns": [*columns, "max_version", "failure"]}}
    line = [3, 1, 0, event["worker"], [500, 0, 500, 250, 0, 250], 4, "stop", 0.5, 2, 2]
    write_lines(path / "events.jsonl", [start | legend, line])
    short = load(path).events["trajectory"]
    write_lines(path / "events.jsonl", [start, event])
    assert rows(short) == rows(load(path).events["trajectory"])
    write_lines(path / "events.jsonl", [line])
    with pytest.raises(
        ValueError, match=r"run/events.jsonl: trajectory .* stands before the event"
    ):
        _ = load(path).events


def test_trajectories_of_an_older_run_in_our_records_are_read():
    run = load(ROOT / "results" / "smollm2" / "one_digit-s0")
    responses = run.events["trajectory"]
    assert (responses["started_at"] <= responses["ended_at"]).all() and (
        responses["ended_at"] <= responses["time"]
    ).all()
    assert set(responses["finish_reason"]) <= {"stop", "length"} and len(responses) > 1000


def test_a_file_that_was_packed_by_gzip_is_read_as_before(path):
    write_lines(path / "events.jsonl", [trajectory(0), trajectory(1)])
    unpacked = rows(load(path).events["trajectory"])
    packed = gzip.compress((path / "events.jsonl").read_bytes())
    (path / "events.jsonl.gz").write_bytes(packed)
    (path / "events.jsonl").unlink()
    assert rows(load(path).events["trajectory"]) == unpacked and len(unpacked) == 2


def test_events_of_other_nodes_say_their_node(path):
    write_lines(path / "events.jsonl", [trajectory(0)])
    write_lines(path / "node_10" / "events.jsonl", [trajectory(2)])
    write_lines(path / "node_2" / "events.jsonl", [trajectory(1)])
    responses = load(path).events["trajectory"]
    assert responses["node"].tolist() == [0, 2, 10] and responses["ticket"].tolist() == [0, 1, 2]


def test_a_run_that_is_going_on_or_was_killed_is_read_without_its_half_written_lines(path):
    write_lines(path / "samples.jsonl", [{"step": 1, "prompt": "p"}])
    for name in ("metrics.jsonl", "samples.jsonl", "node_1/events.jsonl"):
        (path / name).parent.mkdir(exist_ok=True)
        with open(path / name, "a") as file:
            file.write('{"step": 2')
    run = load(path)
    assert run.cut == ["metrics.jsonl", "node_1/events.jsonl", "samples.jsonl"]
    assert len(run.metrics) == 20 and run.samples["prompt"].tolist() == ["p"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", None, "metrics.jsonl does not exist; give the directory of a run"),
        ("run.json", None, "run.json does not exist; give the directory of a run"),
        ("run.json", "{", "run.json is not JSON"),
        ("metrics.jsonl", "", "is empty: the run has not finished a step; wait for it"),
        ("metrics.jsonl", '{}\n{"st\n{}\n', "metrics.jsonl, line 2 of 3 is not JSON"),
        ("events.jsonl", '{"event": "a"}\n{"ev\n{}\n', "events.jsonl, line 2 of 3 is not JSON"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(path, name, content, message):
    (path / name).unlink(missing_ok=True)
    if content is not None:
        (path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        _ = load(path).events
    assert "\n" not in str(error.value)


def test_a_summary_has_the_ends_of_the_curves_the_staleness_and_the_speed(path):
    assert summarise(load(path).metrics) == {
        "steps": 20, "samples": 80, "seconds": 40.0, "seconds_per_step": 2.0,
        "reward_first": pytest.approx(0.075), "reward_last": pytest.approx(0.975),
        "accuracy_first": 0.25, "accuracy_last": 0.75, "accuracy_best": 0.875,
        "staleness_mean": pytest.approx(19 / 20), "staleness_settled": 1.0, "staleness_max": 1,
        "tokens_per_s": 50.0, "wait_share": 0.25,
    }  # fmt: skip


def test_what_was_not_measured_is_none():
    summary = summarise(frame([step_line(1)]).drop(columns=["tokens/generated", "time/wait_s"]))
    unknown = {name for name, value in summary.items() if value is None}
    assert unknown == {
        "accuracy_first",
        "accuracy_last",
        "accuracy_best",
        "tokens_per_s",
        "wait_share",
    }


def test_an_evaluation_stands_where_its_version_was_made_not_where_it_was_reported(path):
    metrics = load(path).metrics
    assert dict(evaluations(metrics)) == {0: 0.25, 10: 0.875, 20: 0.75}
    reached = progress(metrics)
    assert reached.loc[[0, 20]].to_numpy().tolist() == [[0, 0], [80, 40]]
    assert progress(metrics[10:])["samples"].iloc[0] == 40


def test_runs_of_one_name_are_told_apart_by_their_paths(path):
    here = load(path)
    assert names([here]) == ["run"] and names([here, here]) == [str(path)] * 2


def test_a_column_without_any_value_is_kept():
    table = frame([{"a": None, "b": [1]}, {"b": [2], "c": "x"}])
    assert list(table) == ["a", "b", "c"] and rows(table) == [{"b": [1]}, {"b": [2], "c": "x"}]
    assert isinstance(table, pd.DataFrame)


@pytest.mark.parametrize(
    ("share_prefix", "today"), [(True, "prompt"), (False, "off"), ("tree", "tree")]
)
def test_options_of_older_runs_have_todays_names(share_prefix, today):
    recorded = {
        "share_prefix": share_prefix,
        "warmup": 3,
        "weight_decay": 0.1,
        "optim_args": ["epochs=2"],
    }
    options = todays_options(recorded)
    expected = Config(
        share_prefix=today, optim=OptimOptions(epochs=2, warmup=3, args=("weight_decay=0.1",))
    )
    assert Config.from_dict(options) == expected and recorded["share_prefix"] == share_prefix
