"""Tables, pairs and figures of grids, from made-up cells and from those that are kept in results/."""

import csv
import json
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


def by_first_cell(lines):
    """The rows of a table, without their first column and the heading, by that first column."""
    cells = [line.strip("| ").split(" | ") for line in lines[2:] if line[:1] == "|"]
    return {row[0]: row[1:] for row in cells}


# Accuracy


def test_a_cell_of_the_table_is_mean_and_standard_deviation_over_the_seeds_that_did_not_fail():
    records = [
        make_record("tis", seed=seed, last=last) for seed, last in enumerate((0.5, 0.7, 0.9))
    ]
    records += [
        make_record("grpo", seed=seed, last=0.8, error="e" * (seed > 0)) for seed in range(3)
    ]
    records += [make_record("grpo", delay=4, seed=seed, error="e") for seed in range(3)]
    lines = grids.table(records)
    assert (
        lines[0] == "|  | `async_ratio` 0, `publish_delay` 0 | `async_ratio` 0, `publish_delay` 4 |"
    )
    assert by_first_cell(lines) == {
        "before training": ["0.250", "0.250"],
        "`grpo`": ["0.800, n = 1, failed 2/3", "failed 3/3"],
        "`tis`": ["0.700 ± 0.200", "–"],
    }
    assert (
        "standard deviation over n = 3 seeds; failed k/m" in lines[-1]
        and "per run: 160." in lines[-1]
    )


def test_a_grid_in_which_every_run_failed_has_a_table():
    lines = grids.table([make_record(error="e")])
    assert by_first_cell(lines)["`grpo`"] == ["failed 1/1"] and "per run: –." in lines[-1]


def test_losses_with_options_of_their_own_have_rows_and_other_options_columns():
    records = [
        make_record(lr=0.01),
        make_record(lr=0.001),
        make_record(lr=0.001, algo_args=["clip_high=0.3"]),
    ]
    lines = grids.table(records)
    assert (
        "`publish_delay` 0, `lr` 0.001 | `async_ratio` 0, `publish_delay` 0, `lr` 0.01 |"
        in lines[0]
    )
    assert by_first_cell(lines)["`grpo:clip_high=0.3`"] == ["0.750", "–"]


def test_accuracy_before_training_is_averaged_over_the_losses_and_then_over_seeds():
    records = [make_record(algo, seed=seed) for algo in ("grpo", "tis") for seed in range(2)]
    for record, start in zip(records, (0.1, 0.5, 0.3, 0.7), strict=True):
        record["evaluations"] = [[0, start], [20, 0.8]]
    assert by_first_cell(grids.table(records))["before training"] == ["0.400 ± 0.283"]


def test_the_table_of_the_recorded_replays_is_made_again():
    made = grids.replay_table(grids.read_records(RESULTS / "replay" / "replays.jsonl"))
    assert made == (RESULTS / "replay" / "table.md").read_text().splitlines()


# Pairs


def make_pairs(*, gap=0.02, swing=0.0, steps=80, delay=4):
    """Three seeds, each of another level: reward rises by 0.01 a version, and is `gap` lower where weights are late."""
    records = []
    for seed, more in enumerate((0.001, -0.001, 0.0)):
        for k in (0, delay):
            versions = np.maximum(0, np.arange(steps) - k)
            reward = (
                0.01 * versions
                + seed / 10
                - (gap - more) * (k > 0)
                + swing * (k > 0) * (-1.0) ** versions
            )
            records.append(make_record(delay=k, seed=seed, steps=steps, reward=reward.tolist()))
    return records


def test_pairs_are_of_one_seed_and_of_the_version_that_sampled():
    found = grids.differences(make_pairs())
    assert found[["start", "end"]].to_numpy().tolist() == [[40, 75]] * 3
    assert found["level"].round(6).tolist() == [-0.019, -0.021, -0.02]
    assert found["area"].round(6).tolist() == [-0.019, -0.021, -0.02]
    assert found["oscillation"].abs().max() < 1e-9


def test_a_swing_is_oscillation_and_neither_level_nor_area():
    found = grids.differences(make_pairs(gap=0.0, swing=0.1))
    assert found["oscillation"].tolist() == pytest.approx([0.1] * 3, rel=0.05)
    assert found["level"].abs().max() < 0.002


def test_the_table_of_pairs_has_mean_and_interval_and_sentences_say_no_more_than_they():
    rows = grids.compare(grids.differences(make_pairs()))
    (cell,) = by_first_cell(grids.compact(rows))["`grpo`"]
    assert cell == "**−0.020 (−0.022 … −0.018)**"
    said = "1 of 1 intervals leave zero out, by chance alone 0.1 would; 1, in bold, after Holm's"
    assert said in grids.compact(rows)[-1]
    (said,) = grids.sentences(rows)
    assert said.endswith(
        ": 1 of 1 intervals leave zero out."
        "\n  - Leave zero out after Holm's correction over 1 too: `grpo` −0.020 (−0.022 … −0.018)."
    )
    above, unclear = (grids.compare(grids.differences(make_pairs(gap=gap))) for gap in (-0.02, 0.0))
    assert above["says"].tolist() == [grids.ABOVE]
    assert unclear["says"].tolist() == [grids.UNCLEAR] and not unclear["stays"].any()
    assert grids.sentences(unclear)[0].endswith(
        ": 0 of 1 intervals leave zero out.\n  - Include zero, within ±0.02: `grpo`."
    )


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_too_few_pairs_show_nothing_however_alike_they_are(num_seeds):
    found = pd.DataFrame({"setting": "lag 4", "loss": "grpo", "level": [-0.5] * num_seeds})
    rows = grids.compare(found)
    assert rows["says"].tolist() == [grids.FEW] and not rows["stays"].any()
    (said,) = grids.sentences(rows)
    assert said.startswith(
        "- lag 4: 0 of 0 intervals leave zero out.\n  - Too few seeds to say: `grpo` −0.500 ("
    )
    assert "0 of 0 intervals leave zero out" in grids.compact(rows)[-1]
    assert grids.compact(rows)[-1].endswith("1 have too few seeds to say.")


def test_seeds_that_are_all_alike_as_coarse_accuracies_can_be_prove_nothing():
    found = pd.DataFrame({"setting": "lag 4", "loss": "grpo", "level": [-1 / 3] * 3})
    assert not grids.compare(found)["stays"].any()


def test_holms_correction_stops_at_the_first_comparison_that_fails():
    p = {"a": 0.001, "b": 0.02, "c": 0.03, "d": 0.9}  # against 0.0125, 0.0167, 0.025, 0.05
    values = {name: _with_p(one) for name, one in p.items()}
    found = [{"setting": "s", "loss": name, "level": v} for name, of in values.items() for v in of]
    rows = grids.compare(pd.DataFrame(found)).set_index("loss")
    (said,) = grids.sentences(rows.reset_index())
    counts, _, named = said.partition("Leave zero out after Holm's correction over 4 too: ")
    assert counts.startswith(
        "- s: 3 of 4 intervals leave zero out.\n  - Include zero, and are wider: `d` +"
    )
    left_out = counts.partition("Leave zero out before correction only: ")[2]
    assert "`b` +" in left_out and "`c` +" in left_out and "`d`" not in left_out
    assert "`a` +" in named and "`b`" not in named
    assert rows["stays"].to_dict() == {"a": True, "b": False, "c": False, "d": False}
    assert rows["says"].to_dict() == {
        "a": grids.ABOVE,
        "b": grids.ABOVE,
        "c": grids.ABOVE,
        "d": grids.UNCLEAR,
    }


def _with_p(p):
    """Five values whose mean has this two-sided p by Student's t."""
    spread = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    return (spread + stats.t.isf(p / 2, 4) * stats.sem(spread)).tolist()


def test_an_interval_that_is_wide_is_told_from_one_that_shows_that_there_is_little():
    values = {"steady": [-0.001, 0.001, 0.0], "falls_once": [-0.01, -0.01, -0.4]}
    found = [{"setting": "s", "loss": name, "level": v} for name, of in values.items() for v in of]
    (said,) = grids.sentences(grids.compare(pd.DataFrame(found)))
    assert said.startswith("- s: 0 of 2 intervals leave zero out.")
    assert "Include zero, within ±0.02: `steady`." in said
    assert "Include zero, and are wider: `falls_once` −0.140 (" in said


def test_all_are_compared_up_to_the_last_version_that_sampled_in_every_run():
    late = [r for r in make_pairs(delay=16) if r["cell"]["publish_delay"]]
    found = grids.differences(make_pairs() + late)
    assert found["end"].unique().tolist() == [63] and len(found) == 6


def test_the_final_accuracy_is_of_the_last_weights():
    records = make_pairs(gap=0.0, delay=10)
    for record in records:
        record["evaluations"] = [[0, 0.25], [80, 0.5 if record["cell"]["publish_delay"] else 0.75]]
    found = grids.differences(records)
    assert found["final"].tolist() == [-0.25] * 3
    for record in records:
        record["evaluations"] = []
    assert grids.differences(records)["final"].isna().all()


def test_a_loss_without_a_fresh_run_is_compared_with_that_of_grpo_where_it_has_one_gradient():
    records = make_pairs()
    late = [record for record in records if record["cell"]["publish_delay"]]
    for record in late:
        record["cell"]["algo"] = "tis"
    assert grids.differences(records)["level"].round(6).tolist() == [-0.019, -0.021, -0.02]
    for change in ({"minibatches": 4}, {"algo_args": ["clip_high=3.0"]}, {"algo": "own.py:loss"}):
        changed = [
            r | {"cell": r["cell"] | change} if r["cell"]["publish_delay"] else r for r in records
        ]
        assert grids.differences(changed).empty
    assert grids.differences([r | {"options": ["--minibatches", "4"]} for r in records]).empty


def test_the_interval_is_students():
    assert grids.interval([1.0, 2.0, 3.0]) == pytest.approx((-0.484, 4.484), abs=1e-3)


def test_a_last_part_that_is_too_short_has_no_level_but_an_area():
    found = grids.differences(make_pairs(steps=20, delay=8))
    assert found["level"].isna().all() and found["area"].notna().all()
    page = grids.paired_page(make_pairs(steps=20, delay=8))
    assert any("Area" in line for line in page) and not any("Level:" in line for line in page)


def test_a_batch_of_several_versions_counts_for_its_mean_one():
    record = make_record(ratio=0.5, steps=4, reward=[0.0, 0.1, 0.2, 0.3])
    assert grids.reward_by_version(record).to_dict() == pytest.approx({0: 0.05, 1: 0.15, 2: 0.25})


def test_runs_that_failed_and_those_without_a_fresh_one_have_no_pair():
    records = make_pairs()
    records[1]["error"] = records[2]["error"] = "it broke"
    assert grids.differences(records)["seed"].tolist() == [2]
    assert (
        grids.paired_page([record for record in records if record["cell"]["publish_delay"]]) == []
    )


# Records, figures, report


def test_a_cell_that_was_written_twice_counts_once_and_a_broken_line_is_named(tmp_path):
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(json.dumps(make_record(last=last)) + "\n" for last in (0.5, 0.6)))
    assert [record["evaluations"][-1][1] for record in grids.read_records(path)] == [0.6]
    with open(path, "a") as file:
        file.write('{"cell": {"al')
    with pytest.raises(ValueError, match=r"line 3 of 3 is not JSON.*delete the line"):
        grids.read_records(path)


def test_curves_stand_at_the_samples_of_a_version():
    accuracy = grids.accuracy_over_samples(grids.metrics_of(make_record()))
    assert accuracy.to_dict() == {0: 0.25, 80: 1.0, 160: 0.75}


GRIDS = {
    "many losses, settings and seeds, of unlike lengths, some of them failed": [
        make_record(
            algo,
            ratio,
            delay,
            seed,
            0.5 + seed / 10,
            20 - 3 * seed,
            "e" * (algo == "gspo" and seed > delay),
        )
        for algo in ("tis", "gspo")
        for ratio, delay in ((0.0, 0), (0.0, 4), (1.0, 0), (2.0, 0))
        for seed in range(2)
    ],
    "one run": [make_record()],
    "one step, of a run that failed": [make_record(steps=1, error="e")],
    "no evaluations": [make_record() | {"evaluations": []}],
}


@pytest.mark.parametrize("records", GRIDS.values(), ids=GRIDS)
def test_a_report_writes_tables_the_csv_and_figures_that_show_something(records, tmp_path, capsys):
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    grids.report(tmp_path)
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() in printed
    assert (tmp_path / "paired.md").exists() == (len(records) > 1)
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5
    assert str(tmp_path / "curves.png") in printed
    rows = list(csv.DictReader((tmp_path / "cells.csv").open()))
    assert len(rows) == len(records) and list(rows[0])[:4] == [
        "algo",
        "async_ratio",
        "publish_delay",
        "seed",
    ]


def test_the_csv_is_sorted_and_rounds_what_was_measured_and_leaves_blank_what_was_not(tmp_path):
    records = [
        make_record("tis", seed=1, last=1 / 3),
        make_record("tis", error='a "b",\nc'),
        make_record("grpo", 1.0),
    ]
    records[2]["evaluations"] = []
    records = [record | {"cell": record["cell"] | {"lr": 1e-6}} for record in records]
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    grids.report(tmp_path)
    assert (tmp_path / "cells.csv").read_text().splitlines()[1:] == [
        'tis,0.0,0,0,1e-06,20,160,0.75,1.0,0.975,0.0,2,40.0,"a ""b"", c"',
        "tis,0.0,0,1,1e-06,20,160,0.33333,1.0,0.975,0.0,2,40.0,",
        "grpo,1.0,0,0,1e-06,20,160,,,0.975,1.0,2,40.0,",
    ]
