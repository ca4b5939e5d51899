"""A round of tests/chaos, whose command makes twenty: python -m tests.chaos."""

import os
import signal

import pytest
from chaos import campaign
from real_job import SMALL, assert_nothing_is_left

from scripts.lines import read

pytestmark = pytest.mark.e2e


def test_a_run_whose_trainer_is_killed_while_it_saves_loses_nothing(tmp_path):
    shared_memory = set(os.listdir("/dev/shm"))
    fault = campaign.Fault("trainer", signal.SIGKILL, "checkpoint", 0.0)
    options = SMALL | {"steps": 8, "save_every": 1}
    result = campaign.run_rounds(tmp_path, 1, seed=0, options=options, faults=[fault])
    (ended,), (account,) = result["rounds"], result["accounts"]
    assert ended["outcome"] == "ended" and "exitcode: -9" in ended["cause"]
    # A save goes on beside one step, and the next save waits for it. So the newest two steps may have none.
    events = read(tmp_path / "run_0/run/events.jsonl")
    (resumed,) = [event["step"] for event in events if event["event"] == "run_resumed"]
    assert ended["step"] - 2 <= resumed < 8
    assert account["starts"] == 2 and account["consumed"] == 8 * SMALL["groups_per_step"]
    assert_nothing_is_left([], shared_memory)
