"""Tables, pairs and figures of grids: random cells against scipy and plain loops, and stored tables made again."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from scipy import stats

from scripts import grids

RNG = np.random.default_rng(0)


def make_record(algo="grpo", delay=0, seed=0, *, ratio=0.0, steps=40, error=None, **options):
    """A run with random rewards. Its last weights are always evaluated."""
    cell = {"algo": algo, "async_ratio": ratio, "publish_delay": delay, "seed": seed} | options
    series = {
        "reward": RNG.uniform(size=steps).tolist(),
        "staleness_mean": [min(step, delay) + ratio for step in range(steps)],
        "staleness_max": [min(step, delay) + 2 for step in range(steps)],
        "step_s": [2.0] * steps,
        "samples": [8 * step for step in range(1, steps + 1)],
        "drift_k3": [step / 8 for step in range(steps)],
    }
    evaluations = [[0, 0.25], [0, 0.3], [steps // 2, 1.0], [steps, RNG.uniform()]]
    record = {"cell": cell, "options": [], "series": series, "evaluations": evaluations}
    return record | ({"error": error} if error else {})


@pytest.mark.parametrize(
    ("changes", "fresh", "is_compared"),
    [
        ({}, "grpo", True),
        ({}, "tis", False),
        ({"minibatches": 4}, "grpo", False),
        ({"algo": "my_loss.py:loss"}, "grpo", False),
        ({"error": "it broke"}, "grpo", False),
    ],
)
def test_grpos_fresh_run_serves_a_loss_without_one_where_both_have_one_gradient(
    changes, fresh, is_compared
):
    shared = {name: changes[name] for name in ("minibatches", "algo_args") if name in changes}
    stale = make_record(**{"algo": "m2po", "delay": 4} | changes)
    rows = grids.differences([make_record(fresh, **shared), stale])
    assert len(rows) == is_compared
    if not is_compared:
        assert grids.paired_page(rows) == []
    stale["options"] = ["--minibatches", "4"]
    assert grids.differences([make_record(), stale]).empty


def test_intervals_and_p_are_scipys_and_holms_correction_is_that_of_its_definition():
    rng = np.random.default_rng(2)
    seeds = {f"loss {i}": rng.normal(i / 4, 1.0, 4 + i % 2) for i in range(24)}
    rows = [
        {"setting": "s", "loss": name, "level": value}
        for name, values in seeds.items()
        for value in [*values, math.nan]
    ]
    compared = grids.compare(pd.DataFrame(rows)).set_index("loss")
    tests = {name: stats.ttest_1samp(values, 0.0) for name, values in seeds.items()}
    # Holm: from the least p on, the i-th of m stays while p ≤ 0.05 / (m − i).
    holds = True
    for i, name in enumerate(sorted(tests, key=lambda name: tests[name].pvalue)):
        row, test, values = compared.loc[name], tests[name], seeds[name]
        low, high = test.confidence_interval(0.95)
        expected = [values.mean(), low, high, test.pvalue]
        assert row[["mean", "low", "high", "p"]].tolist() == pytest.approx(expected)
        holds = holds and test.pvalue <= 0.05 / (len(tests) - i)
        text = f"{values.mean():+.3f} ({low:+.3f} … {high:+.3f})".replace("-", "−")
        assert (row["stays"], row["text"]) == (holds, f"**{text}**" if holds else text)
    by_bonferroni = (compared["p"] <= 0.05 / 24).sum()
    assert 0 < by_bonferroni < compared["stays"].sum() < 24
    assert grids.compact(compared.reset_index())[-1].startswith("n = 4 to 5 seeds; mean (95 %")


def test_too_few_seeds_and_those_that_are_all_alike_show_nothing():
    texts = {"−0.500 (n = 1)": [-0.5], "−0.400 (n = 2)": [-0.4] * 2}
    texts["−0.333 (−0.333 … −0.333)"] = [-1 / 3] * 3
    rows = [
        {"setting": "s", "loss": text, "level": value}
        for text, values in texts.items()
        for value in values
    ]
    compared = grids.compare(pd.DataFrame(rows))
    assert compared["text"].tolist() == [*texts]
    assert compared[["p", "stays"]].to_numpy().tolist() == [[1.0, False]] * 3


def test_seeds_that_agree_better_than_their_runs_noise_get_the_interval_of_the_noise():
    """The reward of each run is noise around its level, so its level's error is known."""
    noise, num_versions, changes = 0.06, 40, []
    for seed in range(3):
        fresh = make_record(seed=seed, steps=num_versions)
        stale = make_record(seed=seed, steps=num_versions, delay=4)
        rewards = RNG.normal(0.5, noise, num_versions)
        fresh["series"]["reward"] = rewards.tolist()
        stale["series"]["reward"] = rewards.tolist()
        changes += [fresh, stale]
    rows = grids.differences(changes)
    late = num_versions - 4 - num_versions // 2
    expected = math.sqrt(2) * noise / math.sqrt(late)
    assert rows["level_noise"].mean() == pytest.approx(expected, rel=0.4)
    agreeing = rows.assign(level=[0.002, 0.0021, 0.0022])
    (compared,) = grids.compare(agreeing).itertuples()
    error = math.sqrt((rows["level_noise"] ** 2).mean() / 3)
    half = stats.t(2).ppf(0.975) * error
    assert [compared.low, compared.high] == pytest.approx([0.0021 - half, 0.0021 + half])
    assert not compared.stays
    (without_noise,) = grids.compare(agreeing.drop(columns="level_noise")).itertuples()
    assert without_noise.stays


# Records, figures, report


def write_cells(out, records):
    (out / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_cell_that_was_written_twice_counts_once_and_a_broken_line_is_named(tmp_path):
    records = [make_record(), make_record()]
    write_cells(tmp_path, records)
    path = tmp_path / "cells.jsonl"
    assert grids.read_records(path) == records[1:]
    path.write_text(path.read_text() + '{"options": []}\n')
    with pytest.raises(ValueError, match=r"line 3 is not a cell .*delete the line"):
        grids.read_records(path)


def test_a_report_writes_the_tables_the_csv_and_a_figure_that_shows_something(tmp_path, capsys):
    records = []
    for seed in range(2):
        for algo, delay in (("tis", 4), ("tis", 16), ("grpo", 0), ("grpo", 4)):
            error = "a\nb" if (algo, delay, seed) == ("grpo", 4, 1) else None
            record = make_record(algo, delay, seed, error=error)
            record["series"]["reward"] = [(step + seed) / 64 for step in range(40)]
            records.append(record | {"evaluations": [[0, 0.25], [40, (delay + seed) / 32]]})
    write_cells(tmp_path, records)
    grids.report(tmp_path)
    golden = Path(__file__).with_name("grids.txt").read_text()
    names = ("table.md", "cells.csv", "paired.md")
    assert "\n".join((tmp_path / name).read_text() for name in names) == golden
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() in printed
    assert str(tmp_path / "curves.png") in printed
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


@pytest.mark.parametrize(
    "changes", [{"error": "e", "evaluations": [[40, 0.5]]}, {"error": "e"}, {"evaluations": []}]
)
def test_a_grid_of_which_nothing_can_be_drawn_has_a_table(changes, tmp_path):
    write_cells(tmp_path, [make_record() | changes])
    grids.report(tmp_path)
    assert "| `async_ratio` 0, `publish_delay` 0 | grpo |" in (tmp_path / "table.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} > {"curves.png", "cells.csv"}


def test_curves_stand_at_the_samples_of_a_version_and_failed_runs_have_none():
    record = make_record()
    final = record["evaluations"][-1][1]
    assert grids.accuracy_over_samples(record).to_dict() == {0: 0.3, 160: 1.0, 320: final}
    assert grids.accuracy_over_samples(record | {"error": "e"}).empty


def test_a_loss_of_the_user_is_called_by_the_name_of_its_file():
    cell = {"algo": "/home/me/losses/soft.py:loss", "algo_args": ["decay=0.9"], "seed": 0}
    assert grids.loss(cell) == "soft.py:loss:decay=0.9"
