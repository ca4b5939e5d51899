"""The study of staleness: its pages are what the tool makes of the records, and its sentences follow the table."""

import json
import re

import numpy as np
import pytest
from matplotlib.image import imread
from programs import ROOT

from scripts import study

RESULTS = ROOT / "results" / "study"


def test_the_stored_pages_and_the_figure_are_what_the_records_make(tmp_path):
    for part in study.PARTS:
        (tmp_path / part).symlink_to(RESULTS / part)
    study.main(tmp_path)
    for name in ("short.md", "findings.md", "tables.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text(), name
    made, stored = imread(tmp_path / "cost.png"), imread(RESULTS / "cost.png")
    assert made.shape == stored.shape and np.abs(made - stored).mean() < 0.01


def test_the_losses_that_the_page_names_are_those_in_bold():
    page = (ROOT / "docs/staleness.md").read_text()
    short, _, rest = page.partition("## In short")[2].partition("![")
    rows = [line.strip("| ").split(" | ") for line in rest.splitlines() if line[:3] == "| `"]
    bold = [{row[0] for row in rows if row[column].startswith("**")} for column in range(1, 6)]
    for column, lag in enumerate(("1", "4", "16", "4", "16")):
        model = "SmolLM2-135M" if column > 2 else "tiny model"
        sentence = next(
            line for line in short.splitlines() if line.startswith(f"- {model}, lag {lag}:")
        )
        assert {*re.findall(r"`\w+`", sentence.partition(";")[0])} == bold[column], sentence


def test_a_seed_of_which_a_cell_is_missing_counts_for_nothing():
    records = [
        json.loads(line) for line in (RESULTS / "others/cells.jsonl").read_text().splitlines()
    ]
    assert study.whole_seeds(records) == records
    seeds = {record["cell"]["seed"] for record in study.whole_seeds(records[1:])}
    assert seeds == {0, 1, 2} - {records[0]["cell"]["seed"]}


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
        mean, noise = study.over_time({"series": series}, start, end)
        assert mean == pytest.approx(expected, abs=1e-3) and noise > 0
