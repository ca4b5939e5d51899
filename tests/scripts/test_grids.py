"""Tables, pairs and figures of grids: random cells against scipy and plain loops, and stored tables made again."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from scipy import stats
from user_files import write_jsonl

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


def test_grpos_fresh_run_serves_a_loss_without_one_where_both_have_one_gradient():
    fresh, stale = make_record(), make_record("m2po", 4)
    assert len(grids.differences([fresh, stale])) == 1
    assert grids.paired_page(grids.differences([make_record("tis"), stale])) == []
    broken = make_record("m2po", 4, error="it broke")
    several = [make_record("grpo", minibatches=4), make_record("m2po", 4, minibatches=4)]
    for records in ([fresh, broken], [fresh, make_record("my_loss.py:loss", 4)], several):
        assert grids.differences(records).empty


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
    rewards = pd.Series(RNG.normal(0.5, 0.06, 4000))
    noise = grids.error_of_mean(rewards)
    assert noise == pytest.approx(0.06 / math.sqrt(4000), rel=0.1)
    agreeing = pd.DataFrame({"setting": "s", "loss": "l", "level": [0.002, 0.0021, 0.0022]})
    (compared,) = grids.compare(agreeing.assign(level_noise=[noise, 2 * noise, noise])).itertuples()
    half = stats.t(2).ppf(0.975) * noise * math.sqrt(2 / 3)
    assert [compared.low, compared.high] == pytest.approx([0.0021 - half, 0.0021 + half])
    (without_noise,) = grids.compare(agreeing).itertuples()
    assert without_noise.stays and not compared.stays


# Records, figures, report


def test_a_cell_that_was_written_twice_counts_once_and_a_broken_line_is_named(tmp_path):
    records = [make_record(), make_record()]
    path = write_jsonl(tmp_path / "cells.jsonl", records)
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
    write_jsonl(tmp_path / "cells.jsonl", records)
    grids.report(tmp_path)
    golden = Path(__file__).with_name("grids.txt").read_text()
    names = ("table.md", "cells.csv", "paired.md")
    assert "\n".join((tmp_path / name).read_text() for name in names) == golden
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() in printed
    assert str(tmp_path / "curves.png") in printed
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


def test_a_grid_of_which_nothing_can_be_drawn_has_a_table(tmp_path):
    write_jsonl(tmp_path / "cells.jsonl", [make_record(error="e")])
    grids.report(tmp_path)
    assert "| `async_ratio` 0, `publish_delay` 0 | grpo |" in (tmp_path / "table.md").read_text()
