"""One round of tests/chaos, whose command makes twenty: python -m tests.chaos."""

import signal

import pytest
from chaos import campaign
from real_job import SMALL

from scripts.lines import read

pytestmark = pytest.mark.e2e


def test_a_run_whose_trainer_is_killed_while_it_saves_goes_on_and_loses_nothing(tmp_path):
    fault = campaign.Fault("trainer", signal.SIGKILL, "checkpoint", 0.0)
    options = SMALL | {"steps": 6, "save-every": 1}
    result = campaign.run_rounds(tmp_path, 1, seed=0, options=options, faults=[fault])
    (round_,), (account,) = result["rounds"], result["accounts"]
    assert round_["outcome"] == "ended" and "exitcode: -9" in round_["cause"]
    events = read(tmp_path / "run_0/run/events.jsonl")
    (resumed,) = [event["step"] for event in events if event["event"] == "run_resumed"]
    assert (
        1 <= resumed < 6
        and account["starts"] == 2
        and account["consumed"] == 6 * SMALL["groups-per-step"]
    )
