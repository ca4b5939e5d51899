"""The study of staleness: tables.md is what the records say, and each part of it follows from made-up numbers."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from scripts import grids, staleness

ROOT = Path(__file__).parents[2]


def write(folder, part, change=None):
    """Write a part of the study of five losses and three seeds, whose reward is lower by the loss's cost of a lag.

    `change`, if given, edits each record.
    """
    costs = {"reinforce": 0.03, "grpo": 0.02, "dppo": 0.001, "tis": 0.0, "topr": 0.0}
    records = []
    for seed in range(3):
        for algo, cost in costs.items():
            for lag in (0, 16) if algo in ("grpo", "reinforce") else (16,):
                rng = np.random.default_rng([seed, lag])
                noise = 0.01 * rng.standard_normal(80)
                series = {
                    "reward": (0.8 + noise - cost * lag * (1 + seed / 100)).tolist(),
                    "staleness_mean": [float(min(step, lag)) for step in range(80)],
                    "staleness_max": [min(step, lag) for step in range(80)],
                    "step_s": [1.0] * 80,
                    "samples": list(range(80)),
                }
                cell = {"algo": algo, "async_ratio": 0.0, "publish_delay": lag, "seed": seed}
                record = {"cell": cell, "git_commit": "0123456789abcdef", "options": []}
                record["hardware"] = {"cpu_cores": 2, "cpu": "CPU"}
                records.append(record | {"evaluations": [[80, 0.5]], "series": series})
    for record in records:
        if change:
            change(record)
    (folder / part).mkdir(exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / part / "cells.jsonl").write_text(lines)
    return records


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the study is read from, empty."""
    monkeypatch.setattr(staleness, "RESULTS", tmp_path)
    return tmp_path


def test_tables_and_figure_are_made_again_from_the_records(folder):
    for part in staleness.PARTS:
        (folder / part).symlink_to(ROOT / "results" / "study" / part)
    staleness.main()
    assert (folder / "tables.md").read_text() == (ROOT / "results/study/tables.md").read_text()
    pixels = imread(folder / "cost.png")
    assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


def test_what_the_page_says_in_short_of_levels_is_what_its_table_has_in_bold():
    page = (ROOT / "docs/staleness.md").read_text()
    short, _, rest = page.partition("## In short")[2].partition("![")
    assert short.count("\n- ") <= 8
    rows = [line.strip("| ").split(" | ") for line in rest.splitlines() if line[:3] == "| `"]
    bold = [{row[0] for row in rows if row[column].startswith("**")} for column in range(1, 6)]
    _, at_4, at_16, _, smollm2, _ = short.strip().split("\n")
    names = [set(re.findall(r"`\w+`", text)) for text in (at_4, at_16.partition(";")[0], smollm2)]
    assert [set(), names[0], names[1], set(), names[2]] == bold


def test_a_seed_of_which_a_cell_is_missing_counts_for_nothing(folder):
    records = write(folder, "lag")
    assert staleness.whole("lag") == records
    lines = [json.dumps(record) + "\n" for record in records[:-1]]
    (folder / "lag" / "cells.jsonl").write_text("".join(lines))
    assert staleness.whole("lag") == [], "two seeds show nothing"


def test_a_run_that_several_parts_have_is_compared(folder):
    for part in staleness.PARTS:
        write(folder, part)
    assert "21 runs are in several parts; 21 of these have the same" in staleness.what_was_run()[-1]
    write(folder, "time", lambda record: record["series"].update(reward=[0.0] * 80))
    assert "21 runs are in several parts; 0 of these" in staleness.what_was_run()[-1]


def test_lags_are_differences_from_fresh_runs_and_rounding_is_apart(folder):
    write(folder, "lag")
    found = staleness.lags("lag")
    assert set(found["setting"]) == {"lag 16"} and len(found) == 15
    by_loss = found.groupby("loss")["level"].mean()
    assert by_loss["reinforce"] - by_loss["tis"] == pytest.approx(-0.03 * 16 * 1.01)
    assert "level +0.0000 (+0.0000 … +0.0000), area" in staleness.rounding(63)


def test_the_order_has_the_best_loss_first_and_pairs_are_compared_seed_by_seed(folder):
    write(folder, "lag")
    assert list(staleness.levels("lag"))[-2:] == ["grpo", "reinforce"]
    lines = staleness.order("lag")
    assert "| `reinforce` |" in lines[6] and lines[6].endswith("| none |")
    assert "`reinforce`" in lines[5].rpartition(" | ")[2] and lines[-1].startswith("10 pairs")
    level = pd.DataFrame({"a": [3.0, 2.1, 1.2], "b": [2.0, 1.1, 0.3], "c": [2.0, 1.2, 0.0]})
    pairs = staleness.compare_pairs(level)
    assert pairs[["setting", "loss"]].to_numpy().tolist() == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert (pairs["low"] > 0).tolist() == [True, True, False]


def test_another_rate_is_compared_with_the_defaults_of_the_same_loss_and_seed(folder):
    write(folder, "lag")

    def at_other_rate(record):
        record["cell"]["lr"] = 0.0003
        if record["cell"]["publish_delay"]:
            record["series"]["reward"] = [reward + 0.1 for reward in record["series"]["reward"]]

    write(folder, "rates", at_other_rate)
    lines = staleness.rates(staleness.lags("lag"))
    assert lines[0] == "| loss | `lr` 0.0003 |"
    assert all("| +0.100 (+0.100 … +0.100) |" in line for line in lines[2:7])
    assert lines[-1].startswith("| `lr` 0.001 with one update a step | 0.8")


def test_weights_count_from_when_they_are_made_however_late_their_samples_are_trained_on():
    series = {"reward": [0.0, 1.0, 0.5], "step_s": [1.0, 3.0, 10.0], "staleness_mean": [0.0] * 3}
    assert staleness.over_time({"series": series}, 0, 4) == pytest.approx(0.75)
    assert staleness.over_time({"series": series}, 3, 5) == pytest.approx(0.75)
    a_step_later = {
        "reward": [0.0, 0.0, 1.0, 0.5],
        "step_s": [1.0, 3.0, 10.0, 1.0],
        "staleness_mean": [0.0, 1.0, 1.0, 1.0],
    }
    assert staleness.over_time({"series": a_step_later}, 0, 4) == pytest.approx(0.75)


def test_at_equal_time_all_ratios_of_a_loss_and_seed_are_cut_where_the_first_ends(folder):
    def at_ratio(record):
        """Rewards rise over steps; with α = 2 a step takes half as long."""
        cell = record["cell"]
        cell["async_ratio"], cell["publish_delay"] = cell["publish_delay"] / 8, 0
        record["series"]["staleness_mean"] = [0.0] * 80
        more = 1 + 0.001 * cell["seed"]
        record["series"]["reward"] = [0.01 * step * more for step in range(80)]
        record["series"]["step_s"] = [0.5 if cell["async_ratio"] else 1.0] * 80

    write(folder, "time", at_ratio)
    runs = staleness.by_time(staleness.whole("time"))
    runs = runs[runs["loss"] == "grpo"]
    assert runs["seconds"].unique().tolist() == [40.0]
    assert runs.groupby("alpha")["steps"].first().to_dict() == {0.0: 40, 2.0: 80}
    rows = grids.compare(staleness.bought(runs), "mean")
    assert rows["setting"].tolist() == ["α = 2"] and rows["mean"][0] == pytest.approx(0.2, abs=0.01)
    assert "deviation of 0.0000, which is of the clock alone." in "".join(staleness.equal_time())
