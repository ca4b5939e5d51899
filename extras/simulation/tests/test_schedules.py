"""The figure of three schedules: its data are events of the real controller."""

import math
from itertools import pairwise

import pytest
from PIL import Image

from scripts import schedules
from scripts.lines import ROOT

NINE = range(9)


@pytest.fixture(scope="module", params=schedules.SCHEDULES)
def schedule(request):
    return schedules.simulated(request.param)


def test_each_schedule_has_the_same_nine_responses(schedule):
    """A token takes a second, so the parts of a bar are as long as its response. Three steps train on all nine."""
    nine = schedule.responses[:9]
    assert [response.number for response in nine] == list(NINE)
    sampled_s = [sum(end - start for _, start, end in response.parts) for response in nine]
    assert sampled_s == pytest.approx(schedules.TOKENS)
    trained = [number for step in schedule.steps[:3] for number in step.responses]
    assert sorted(trained) == list(NINE)


def test_each_age_is_measured_and_within_the_bound(schedule):
    """The oldest colour of a bar is the oldest version of its trajectory, and the bound is ⌈α⌉ + K."""
    ratio, delay = schedule.config.async_ratio, schedule.config.publish_delay
    bound = math.ceil(ratio) + delay
    assert schedule.bound.endswith(f"= {bound}")
    for step, measured in zip(schedule.steps, schedule.staleness, strict=True):
        assert tuple(schedule.age(number) for number in step.responses) == measured
        for number in step.responses:
            oldest_colour = min(version for version, _, _ in schedule.responses[number].parts)
            assert 0 <= step.version - oldest_colour == schedule.age(number) <= bound


def test_bars_of_a_slot_and_of_the_trainer_do_not_overlap(schedule):
    for slot in range(schedules.SLOTS):
        parts = [r.parts for r in schedule.responses if r.slot == slot]
        spans = sorted(span[1:] for spans in parts for span in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    trained = [(step.start, step.end) for step in schedule.steps]
    assert all(end < start for (_, end), (start, _) in pairwise(trained))
    for step in schedule.steps:
        assert all(schedule.responses[number].end <= step.start for number in step.responses)


def test_the_straggler_is_as_old_as_each_bound_allows():
    straggler = schedules.STRAGGLER
    fresh, overlapped, lagged = map(schedules.simulated, schedules.SCHEDULES)
    ages = [schedule.age(straggler) for schedule in (fresh, overlapped, lagged)]
    assert ages == [0, 1, 2]
    versions = [version for version, _, _ in overlapped.responses[straggler].parts]
    assert versions == [1, 2]
    ends = [schedule.steps[2].end for schedule in (fresh, overlapped, lagged)]
    assert ends[1] < ends[2] <= ends[0]


def test_the_command_makes_the_figure(tmp_path):
    schedules.main(tmp_path / "schedules.png")
    with (
        Image.open(tmp_path / "schedules.png") as new_figure,
        Image.open(ROOT / "docs/schedules.png") as kept_figure,
    ):
        assert new_figure.size == kept_figure.size
