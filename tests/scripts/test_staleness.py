"""The study of staleness: tables.md is what the records say, and time is counted as by a clock."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from scripts import staleness

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the study is read from, with the recorded parts."""
    for part in staleness.PARTS:
        (tmp_path / part).symlink_to(ROOT / "results" / "study" / part)
    monkeypatch.setattr(staleness, "RESULTS", tmp_path)
    return tmp_path


def test_tables_and_figure_are_made_again_from_the_records(folder):
    staleness.main()
    assert (folder / "tables.md").read_text() == (ROOT / "results/study/tables.md").read_text()
    pixels = imread(folder / "cost.png")
    assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


def test_what_the_page_says_in_short_of_levels_is_what_its_table_has_in_bold():
    page = (ROOT / "docs/staleness.md").read_text()
    short, _, rest = page.partition("## In short")[2].partition("![")
    rows = [line.strip("| ").split(" | ") for line in rest.splitlines() if line[:3] == "| `"]
    bold = [{row[0] for row in rows if row[column].startswith("**")} for column in range(1, 6)]
    _, at_4, at_16, _, smollm2, _ = short.strip().split("\n")
    names = [set(re.findall(r"`\w+`", text)) for text in (at_4, at_16.partition(";")[0], smollm2)]
    assert [set(), names[0], names[1], set(), names[2]] == bold


def test_a_seed_of_which_a_cell_is_missing_counts_for_nothing(folder):
    records = staleness.whole("others")
    assert records == staleness.records_of("others")
    (folder / "others").unlink()
    (folder / "others").mkdir()
    lines = [json.dumps(record) + "\n" for record in records[:-1]]
    (folder / "others" / "cells.jsonl").write_text("".join(lines))
    assert staleness.whole("others") == [], "two seeds show nothing"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_weights_count_from_when_they_are_made_however_late_their_samples_are_trained_on(lag):
    """Against the mean over a fine grid of moments, at each of which the newest weights count."""
    rng = np.random.default_rng(lag)
    steps_s, rewards = rng.uniform(1, 3, 12), rng.uniform(size=12)
    series = {"reward": rewards, "step_s": steps_s}
    series["staleness_mean"] = [float(min(step, lag)) for step in range(12)]
    by_version = [rewards[: lag + 1].mean(), *rewards[lag + 1 :]]
    ends = np.cumsum(steps_s)
    for start, end in ((0.0, ends[8 - lag]), (3.0, ends[6 - lag])):
        moments = np.linspace(start, end, 100_001)
        newest = np.searchsorted(ends, moments, side="right")
        expected = np.array(by_version)[newest.clip(max=len(by_version) - 1)].mean()
        mean = staleness.over_time({"series": series}, start, end)
        assert mean == pytest.approx(expected, abs=1e-3)
