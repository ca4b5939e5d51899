"""Tables, pairs and figures of grids, from made-up cells and from those that are kept in results/."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from scipy import stats

from scripts import grids

RESULTS = Path(__file__).parents[2] / "results"


def make_record(
    algo="grpo", ratio=0.0, delay=0, seed=0, last=0.75, steps=20, error=None, reward=None, **options
):
    """The record of a run whose accuracy goes from 0.25 up to 1.0 and ends with `last`."""
    cell = {"algo": algo, "async_ratio": ratio, "publish_delay": delay, "seed": seed} | options
    series = {
        "reward": reward or [step / 20 for step in range(1, steps + 1)],
        "staleness_mean": [min(step, delay) + ratio for step in range(steps)],
        "staleness_max": [min(step, delay) + 2 for step in range(steps)],
        "step_s": [2.0] * steps,
        "samples": [8 * step for step in range(1, steps + 1)],
    }
    record = {"cell": cell, "options": [], "seconds": 50.0, "series": series}
    evaluations = [[0, 0.25], [0, 0.25], [steps // 2, 1.0], [steps, last]]
    return record | {"evaluations": evaluations} | ({"error": error} if error else {})


def write_cells(out, records):
    (out / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def by_first_cell(lines):
    """The rows of a table, without their first column and the heading, by that first column."""
    cells = [line.strip("| ").split(" | ") for line in lines[2:] if line[:1] == "|"]
    return {row[0]: row[1:] for row in cells}


# Accuracy


def test_a_cell_of_the_table_is_mean_and_standard_deviation_over_the_seeds_that_did_not_fail():
    records = [make_record("tis", seed=seed, last=0.5 + seed / 5) for seed in range(3)]
    records += [make_record(seed=seed, last=0.8, error="e" * (seed > 0)) for seed in range(3)]
    records += [make_record(delay=4, seed=seed, error="e") for seed in range(3)]
    records += [make_record(delay=4, seed=0, algo_args=["clip_high=0.3"])]
    records[0]["evaluations"][:2] = [[0, 0.15], [0, 0.35]]
    records[1]["evaluations"][:2] = [[0, 0.65]]
    lines = grids.table(records)
    delays = [f"`async_ratio` 0, `publish_delay` {delay}" for delay in (0, 4)]
    assert lines[0] == f"|  | {delays[0]} | {delays[1]} |"
    assert by_first_cell(lines) == {
        "before training": ["0.317 ± 0.115", "0.250"],
        "`grpo`": ["0.800, n = 1, failed 2/3", "failed 3/3"],
        "`grpo:clip_high=0.3`": ["–", "0.750, n = 1"],
        "`tis`": ["0.700 ± 0.200", "–"],
    }
    assert "deviation over n = 3 seeds; failed k/m" in lines[-1] and "per run: 160." in lines[-1]


def test_a_grid_in_which_every_run_failed_has_a_table():
    lines = grids.table([make_record(error="e")])
    assert by_first_cell(lines)["`grpo`"] == ["failed 1/1"] and "per run: –." in lines[-1]


def test_the_table_of_the_recorded_replays_is_made_again():
    made = grids.replay_table(grids.read_records(RESULTS / "replay" / "replays.jsonl"))
    assert made == (RESULTS / "replay" / "table.md").read_text().splitlines()


# Pairs


def make_pairs(*, gap=0.02, swing=0.0, steps=80, delay=4, **late_options):
    """Three seeds, each of another level: reward rises by 0.01 a version, and is `gap` lower where weights are late."""
    records = []
    for seed, more in enumerate((0.001, -0.001, 0.0)):
        for k in (0, delay):
            versions = np.maximum(0, np.arange(steps) - k)
            late = (k > 0) * (more - gap + swing * (-1.0) ** versions)
            reward = (0.01 * versions + seed / 10 + late).tolist()
            options = late_options if k else {}
            records.append(make_record(delay=k, seed=seed, steps=steps, reward=reward, **options))
    return records


def test_pairs_are_of_one_seed_and_of_the_version_that_sampled():
    found = grids.differences(make_pairs())
    assert found[["start", "end"]].to_numpy().tolist() == [[40, 75]] * 3
    for measured in ("level", "area"):
        assert found[measured].round(6).tolist() == [-0.019, -0.021, -0.02]
    assert found["oscillation"].abs().max() < 1e-9
    assert found["final"].tolist() == [0.0] * 3
    late = [record for record in make_pairs(delay=16) if record["cell"]["publish_delay"]]
    assert grids.differences(make_pairs() + late)["end"].tolist() == [63] * 6


def test_a_swing_is_oscillation_and_neither_level_nor_area():
    found = grids.differences(make_pairs(gap=0.0, swing=0.1))
    assert found["oscillation"].tolist() == pytest.approx([0.1] * 3, rel=0.05)
    assert found["level"].abs().max() < 0.002


def test_the_final_accuracy_is_of_the_last_weights():
    records = make_pairs(delay=10)
    for record in records:
        record["evaluations"] = [[0, 0.25], [80, 0.5 if record["cell"]["publish_delay"] else 0.75]]
    assert grids.differences(records)["final"].tolist() == [-0.25] * 3
    records[0]["evaluations"] = []
    assert grids.differences(records)["final"].isna().tolist() == [True, False, False]


def test_intervals_and_p_are_scipys_and_holms_correction_is_that_of_its_definition():
    rng = np.random.default_rng(0)
    values = {f"loss {i}": rng.normal(i / 4, 1.0, 4 + i % 2) for i in range(12)}
    found = [{"setting": "s", "loss": name, "level": v} for name, of in values.items() for v in of]
    rows = grids.compare(pd.DataFrame(found)).set_index("loss")
    tests = {name: stats.ttest_1samp(of, 0.0) for name, of in values.items()}
    for name, test in tests.items():
        ends = test.confidence_interval(0.95)
        assert rows.loc[name, "p"] == pytest.approx(test.pvalue)
        assert rows.loc[name, ["low", "high"]].tolist() == pytest.approx([ends.low, ends.high])
        assert rows.loc[name, "mean"] == pytest.approx(values[name].mean())
    # Holm: from the least p on, the i-th of m stays while p ≤ 0.05 / (m − i)
    stays, holds = {}, True
    for i, name in enumerate(sorted(tests, key=lambda name: tests[name].pvalue)):
        holds = holds and tests[name].pvalue <= 0.05 / (len(tests) - i)
        stays[name] = holds
    assert rows["stays"].to_dict() == stays and 0 < sum(stays.values()) < 12


@pytest.mark.parametrize("values", [[-0.5], [-0.5, -0.5], [-1 / 3] * 3])
def test_too_few_seeds_and_those_that_are_all_alike_show_nothing(values):
    found = pd.DataFrame({"setting": "lag 4", "loss": "grpo", "level": values})
    rows = grids.compare(found)
    assert not rows["stays"].any() and rows["p"].tolist() == [1.0]
    assert grids.interval(values)[0] == pytest.approx(values[0])
    assert math.isnan(rows["low"][0]) == (len(values) < grids.MIN_SEEDS)
    assert f"{len(values) // 3} of {len(values) // 3} intervals" in grids.compact(rows)[-1]


def test_a_table_of_pairs_has_mean_and_interval_and_bold_stays_after_the_correction():
    found = grids.differences(make_pairs())
    lines = grids.compact(grids.compare(found))
    assert by_first_cell(lines)["`grpo`"] == ["**−0.020 (−0.022 … −0.018)**"]
    counts = "1 of 1 intervals leave zero out, by chance alone 0.1 would; 1, in bold, after Holm's"
    assert counts in lines[-1]
    unclear = grids.compact(grids.compare(grids.differences(make_pairs(gap=0.0))))
    assert "0 of 1 intervals" in unclear[-1] and "**" not in unclear[2]
    assert "| `grpo` | −0.019 (n = 1) |" in grids.compact(grids.compare(found[:1]))
    mixed = pd.concat([found, found[:1].assign(loss="tis")])
    assert grids.compact(grids.compare(mixed))[-1].startswith("n = 1 to 3 seeds")


def test_a_loss_without_a_fresh_run_is_compared_with_that_of_grpo_where_it_has_one_gradient():
    found = grids.differences(make_pairs(algo="tis"))
    assert found["loss"].tolist() == ["tis"] * 3 and found["base"].notna().all()
    for options in ({"minibatches": 4}, {"algo_args": ["clip_high=3.0"]}, {"algo": "own.py:loss"}):
        assert grids.differences(make_pairs(**{"algo": "tis"} | options)).empty
    several = [r | {"options": ["--minibatches", "4"]} for r in make_pairs(algo="tis")]
    assert grids.differences(several).empty


def test_a_last_part_that_is_too_short_has_no_level_but_an_area():
    found = grids.differences(make_pairs(steps=20, delay=8))
    assert found["level"].isna().all() and found["area"].notna().all()
    page = "\n".join(grids.paired_page(found))
    assert "**Area: " in page and "**Level: " not in page


def test_a_batch_of_several_versions_counts_for_its_mean_one():
    record = make_record(ratio=0.5, steps=4, reward=[0.0, 0.1, 0.2, 0.3])
    assert grids.reward_by_version(record).to_dict() == pytest.approx({0: 0.05, 1: 0.15, 2: 0.25})


def test_runs_that_failed_and_those_without_a_fresh_one_have_no_pair():
    records = make_pairs()
    records[1]["error"] = records[2]["error"] = "it broke"
    assert grids.differences(records)["seed"].tolist() == [2]
    late = [record for record in records if record["cell"]["publish_delay"]]
    assert grids.paired_page(grids.differences(late)) == []


# Records, figures, report


def test_a_cell_that_was_written_twice_counts_once_and_a_broken_line_is_named(tmp_path):
    write_cells(tmp_path, [make_record(last=last) for last in (0.5, 0.6)])
    path = tmp_path / "cells.jsonl"
    assert [record["evaluations"][-1][1] for record in grids.read_records(path)] == [0.6]
    path.write_text(path.read_text() + '{"options": []}\n')
    with pytest.raises(ValueError, match=r"line 3 is not a cell .*delete the line"):
        grids.read_records(path)


def test_curves_stand_at_the_samples_of_a_version():
    accuracy = grids.accuracy_over_samples(grids.metrics_of(make_record()))
    assert accuracy.to_dict() == {0: 0.25, 80: 1.0, 160: 0.75}


GRIDS = {
    "many losses, settings and seeds, of unlike lengths, some of them failed": [
        make_record(
            algo, ratio, delay, seed, steps=20 - 3 * seed, error="e" * (algo == "gspo" and seed > delay)
        )
        for algo in ("tis", "gspo")
        for ratio, delay in ((0.0, 0), (0.0, 4), (1.0, 0), (2.0, 0))
        for seed in range(2)
    ],
    "one step, of a run that failed": [make_record(steps=1, error="e")],
    "no evaluations": [make_record() | {"evaluations": []}],
}  # fmt: skip


@pytest.mark.parametrize("records", GRIDS.values(), ids=GRIDS)
def test_a_report_writes_tables_the_csv_and_a_figure_that_shows_something(
    records, tmp_path, capsys
):
    write_cells(tmp_path, records)
    grids.report(tmp_path)
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() in printed
    assert (tmp_path / "paired.md").exists() == (len(records) > 1)
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5
    assert str(tmp_path / "curves.png") in printed
    rows = list(csv.DictReader((tmp_path / "cells.csv").open()))
    assert len(rows) == len(records) and {"algo", "publish_delay", "seed"} < rows[0].keys()


def test_the_csv_is_sorted_and_rounds_what_was_measured_and_leaves_blank_what_was_not(tmp_path):
    records = [
        make_record("tis", seed=1, last=1 / 3, lr=1e-6),
        make_record("tis", error='a "b",\nc', lr=1e-6),
        make_record("grpo", 1.0, lr=1e-6) | {"evaluations": []},
    ]
    write_cells(tmp_path, records)
    grids.report(tmp_path)
    assert (tmp_path / "cells.csv").read_text().splitlines()[1:] == [
        'tis,0.0,0,0,1e-06,20,160,0.75,1.0,0.975,0.0,2,40.0,"a ""b"", c"',
        "tis,0.0,0,1,1e-06,20,160,0.33333,1.0,0.975,0.0,2,40.0,",
        "grpo,1.0,0,0,1e-06,20,160,,,0.975,1.0,2,40.0,",
    ]
