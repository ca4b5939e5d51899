"""Two rounds of tests/chaos, whose command makes twenty: python -m tests.chaos."""

import os
import signal

import pytest
from chaos import campaign
from real_job import SMALL, assert_nothing_is_left

from scripts.lines import read

pytestmark = pytest.mark.e2e


def test_a_run_outlives_its_engine_and_loses_nothing_when_its_trainer_is_killed_while_it_saves(
    tmp_path,
):
    shared_memory = set(os.listdir("/dev/shm"))
    faults = [
        campaign.Fault("engine", signal.SIGKILL, "update", 0.0),
        campaign.Fault("trainer", signal.SIGKILL, "checkpoint", 0.0),
    ]
    options = SMALL | {"steps": 10, "save_every": 1}
    result = campaign.run_rounds(tmp_path, 2, seed=0, options=options, faults=faults)
    (recovered, ended), (account,) = result["rounds"], result["accounts"]
    assert recovered["outcome"] == "recovered" and ended["outcome"] == "ended"
    assert "exitcode: -9" in ended["cause"]
    run = tmp_path / "run_0/run"
    events = read(run / "events.jsonl")
    (resumed,) = [event["step"] for event in events if event["event"] == "run_resumed"]
    # A save goes on beside one step, and the next save waits for it. So the newest two steps may have none.
    assert ended["step"] - 2 <= resumed < 10
    (died,) = [event["exit_code"] for event in events if event["event"] == "worker_died"]
    assert died == 1 and account["restarts"] == 1
    assert (run / "worker_0.log").read_text().count("RuntimeError: the engine is dead") == 1
    assert account["starts"] == 2 and account["consumed"] == 10 * SMALL["groups_per_step"]
    assert_nothing_is_left([], shared_memory)
