"""Trajectories as short lines of events.jsonl: what is written of them is read again."""

import json
import re

import numpy as np
import pytest

from asyncrl.controller.journal import Journal
from asyncrl.records import Trajectory
from asyncrl.runlog.trajectory_lines import LEGEND, expand, legend, shorten

SINCE = 1_700_000_000


def make_event(num_turns=1, **changes):
    turns = [[SINCE + 3.2504 + i, SINCE + 3.75 + i, SINCE + 4.0006 + i] for i in range(num_turns)]
    event = {
        "event": "trajectory", "time": SINCE + 9.1236, "ticket": 41, "group": 5, "member": 1, "worker": 0,
        "started_at": SINCE + 3.25, "ended_at": SINCE + 9.1234, "turns": turns, "tokens": 7, "finish_reason": "stop",
        "reward": 0.1 + 0.2, "min_version": 3, "max_version": 4,
    }  # fmt: skip
    return event | changes


def through_a_file(*events):
    lines = [{"event": "run_started", **legend(SINCE)}, *(shorten(event, SINCE) for event in events)]
    return expand(json.loads(json.dumps(lines)))[1:]


def moments(event):
    """All times of an event, in one order."""
    of_turns = [moment for turn in event["turns"] for moment in turn]
    return [event["started_at"], *of_turns, event["ended_at"], event["time"]]


def assert_cut_to_milliseconds(read, event):
    lost_s = np.subtract(moments(event), moments(read))
    assert lost_s.min() > -1e-6 and lost_s.max() < 0.001 + 1e-6


def without_times(event):
    return {name: value for name, value in event.items() if name not in ("time", "started_at", "turns", "ended_at")}


@pytest.mark.parametrize("num_turns", [0, 1, 5])
def test_a_trajectory_is_read_as_it_was_written_but_for_times_cut_to_milliseconds(num_turns):
    event = make_event(num_turns)
    (read,) = through_a_file(event)
    assert without_times(read) == without_times(event) and len(read["turns"]) == num_turns
    assert_cut_to_milliseconds(read, event)
    assert read["started_at"] == SINCE + 3.25 and read["ended_at"] == SINCE + 9.123


def test_roundings_do_not_add_up_over_many_turns():
    event = make_event(turns=[[SINCE + 10.0004 * i] * 3 for i in range(400)])
    (read,) = through_a_file(event)
    assert_cut_to_milliseconds(read, event)


def test_what_a_trajectory_lacks_is_missing_and_what_failed_says_why():
    failed = make_event(0, finish_reason="failed", reward=None, tokens=0, failure='it "broke"')
    failed = {name: value for name, value in failed.items() if not name.endswith("_version")}
    (read,) = through_a_file(failed)
    assert read.keys() == failed.keys() and read["failure"] == 'it "broke"' and read["reward"] is None
    assert "failure" not in through_a_file(make_event())[0]


def test_an_event_with_other_fields_stays_an_object():
    for event in (make_event(machine="far"), {"event": "trajectory", "time": 1.0, "ticket": 3}):
        assert shorten(event, SINCE) is event
    assert expand([make_event()]) == [make_event()], "as in runs of earlier code"


def test_every_start_of_a_run_has_its_own_moment_to_count_from():
    later = SINCE + 10**6
    lines = [
        legend(SINCE),
        shorten(make_event(), SINCE),
        {"event": "step"},
        legend(later),
        shorten(make_event(), later),
    ]
    first, second = (event for event in expand(json.loads(json.dumps(lines))) if event.get("event") == "trajectory")
    assert first == second and lines[1] != lines[4]


def test_a_list_that_no_event_explains_is_an_error_in_one_line():
    with pytest.raises(ValueError, match=re.escape(f"stands before the event with '{LEGEND}'")):
        expand([{"event": "run_started"}, shorten(make_event(), SINCE)])


def test_what_the_controller_records_of_a_trajectory_is_a_line_below_100_bytes_after_a_week():
    week_s, written = 7 * 86400, []
    journal = Journal(lambda event, **fields: written.append({"event": event, "time": SINCE + week_s + 9.3, **fields}))
    journal.trajectory(
        Trajectory(
            ticket_id=98_765_432, group_id=12_345_678, member=15, tokens=np.arange(2000),
            loss_mask=np.arange(2000) > 1, behavior_logprobs=np.zeros(2000, np.float32),
            policy_versions=np.full(2000, 100_000, np.int32), reward=0.5, finish_reason="length", failure="",
            num_turns=1, started_at=SINCE + week_s, ended_at=SINCE + week_s + 9.25, worker=31,
            turns=((SINCE + week_s + 0.01, SINCE + week_s + 9.2, SINCE + week_s + 9.25),),
        )
    )  # fmt: skip
    line = json.dumps(shorten(written[0], SINCE), separators=(",", ":")) + "\n"
    assert line.startswith("[98765432,") and len(line) < 100
