"""The reader of runs, on directories written here as a run writes them."""

import gzip
import json
import re

import pytest

from scripts.runs import evaluations, frame, load, names, progress, rows, summarise

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


def test_events_are_frames_by_kind_whose_ids_stay_whole_numbers(path):
    write_lines(path / "events.jsonl", [trajectory(3, min_version=2), trajectory(4)])
    for node in (10, 2):
        write_lines(path / f"node_{node}" / "events.jsonl", [trajectory(node)])
    run = load(path)
    assert run.name == "run" and run.info == INFO and [*run.events] == ["trajectory"]
    responses = run.events["trajectory"]
    assert responses["ticket"].tolist() == [3, 4, 2, 10]
    assert responses["node"].tolist() == [0, 0, 2, 10]
    first, second, *_ = rows(responses)
    assert json.dumps(first["min_version"]) == "2" and "min_version" not in second
    assert len(run.events["worker_died"]) == 0 and "worker_died" not in run.events


def test_a_file_that_was_packed_by_gzip_is_read_as_before(path):
    write_lines(path / "events.jsonl", [trajectory(0), trajectory(1)])
    unpacked = rows(load(path).events["trajectory"])
    packed = gzip.compress((path / "events.jsonl").read_bytes())
    (path / "events.jsonl.gz").write_bytes(packed)
    (path / "events.jsonl").unlink()
    assert rows(load(path).events["trajectory"]) == unpacked and len(unpacked) == 2


def test_a_run_that_still_trains_or_was_killed_is_read_without_its_half_written_lines(path):
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
    accuracies = {"accuracy_first", "accuracy_last", "accuracy_best"}
    assert unknown == accuracies | {"tokens_per_s", "wait_share"}


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
