"""The page on staleness, from a study that is made up: what it says follows from the numbers, and from nothing else."""

import json

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from algos import LOSSES
from scripts import blocks, grids, staleness


def record_of(cell, *, cost=0.0, steps=80, step_s=1.0):
    """A run whose reward at every version is that of its seed, less what a lag costs it."""
    lag, rng = cell["publish_delay"], np.random.default_rng([cell["seed"], cell["publish_delay"]])
    reward = 0.8 + 0.01 * rng.standard_normal(steps) - cost * lag * (1 + cell["seed"] / 100)
    series = {
        "reward": reward.tolist(),
        "staleness_mean": [min(step, lag + 0.5 * cell["async_ratio"]) for step in range(steps)],
        "staleness_max": [min(step, lag) for step in range(steps)],
        "step_s": [step_s] * steps,
        "samples": list(range(steps)),
    }
    made = {
        "git_commit": "0123456789abcdef",
        "hardware": {"cpu_cores": 2, "cpu": "CPU"},
        "options": [],
    }
    return made | {"cell": cell, "evaluations": [[0, 0.25], [steps, reward[-1]]], "series": series}


COSTS = {"reinforce": 0.03, "grpo": 0.02, "dppo": 0.001}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes the records of a part's cells and makes the page read them."""
    monkeypatch.setattr(staleness, "RESULTS", tmp_path)

    def write(part, keep=lambda cell: True, **options):
        cells = [cell for cell in staleness.cells_of(part) if keep(cell)]
        records = [record_of(cell, cost=COSTS.get(cell["algo"], 0.0), **options) for cell in cells]
        (tmp_path / part).mkdir()
        (tmp_path / part / "cells.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )

    return write


@pytest.mark.slow
def test_a_page_of_a_study_that_has_not_run_says_so_and_nothing_else(write):
    for part in (
        staleness.cost("lag", "level"), staleness.order(), staleness.same_order(), staleness.rates(),
        staleness.equal_time(), staleness.best(),
    ):  # fmt: skip
        assert len(part) == 1 and part[0].startswith("*Not run yet")
    short = staleness.in_short()
    assert (
        short[0] == "**Not answered yet, as runs are missing:**"
        and "".join(short).count("- What lag") == 5
    )
    assert not any("…" in line for line in short)
    assert "**Partial: 0 of 439 runs are there.**" in staleness.was_run()[0]


def test_a_seed_of_which_a_cell_is_missing_counts_for_nothing(write):
    write("lag", lambda cell: cell["seed"] < 2 or (cell["seed"] == 2 and cell["algo"] != "tis"))
    assert {record["cell"]["seed"] for record in staleness.whole("lag", 2)} == {0, 1}
    assert any("| 111 of 190 | 2 of 5 |" in line for line in staleness.was_run())
    assert not staleness.whole("lag") and len(staleness.order()) == 1, "two seeds show nothing"


def test_a_run_that_several_parts_have_is_counted_once_and_compared(write):
    for part in ("lag", "others", "time"):
        write(part)
    text = staleness.was_run()[-1]  # fresh grpo of three seeds in all three, fresh reinforce in two
    assert (
        "6 runs are in several parts; 6 of these have the same rewards to the bit each time."
        in text
    )
    path = staleness.RESULTS / "time" / "cells.jsonl"
    path.write_text(path.read_text().replace('"reward": [0.', '"reward": [1.'))
    assert "6 runs are in several parts; 0 of these" in staleness.was_run()[-1]


def test_a_cost_is_said_with_its_interval_and_rounding_is_apart(write):
    write("lag")
    worse = next(line for line in staleness.in_short() if line.startswith("- lag 16: "))
    counts, _, named = worse.partition("Leave zero out after Holm's correction over 36 too: ")
    assert "`grpo` −0.3" in named and "`reinforce` −0.4" in named and "`tis`" not in named
    assert "within ±0.02: " in counts and "`tis`" in counts
    lines = staleness.cost("lag", "level")
    assert f"{staleness.NOISE}, both fresh: +0.0000 (+0.0000 … +0.0000)." in lines[-1]
    assert "of 36 intervals leave zero out, by chance alone 1.8 would" in lines[-1]
    assert lines[-1].startswith("Versions 40 to 63: n = 5 seeds")
    assert staleness.cost("lag", "area")[-1].startswith("Versions 0 to 63: n = 5 seeds")
    assert staleness.cost("lag", "final")[-1].startswith("n = 5 seeds")


def test_the_order_has_the_best_loss_first_and_says_which_pairs_stay(write):
    write("lag")
    assert list(staleness.levels())[-2:] == ["grpo", "reinforce"]
    lines = staleness.order()
    assert (
        "of 66 pairs" in lines[0]
        and lines[-1].startswith("| `reinforce` |")
        and lines[-1].endswith("| none |")
    )
    assert "`reinforce`" in next(line for line in lines if line.startswith("| `grpo` |"))


def test_pairs_of_losses_are_compared_seed_by_seed():
    level = pd.DataFrame({"a": [3.0, 2.1, 1.2], "b": [2.0, 1.1, 0.2], "c": [2.0, 1.2, 0.0]})
    assert staleness.compare_pairs(level)["says"].tolist() == [
        grids.ABOVE,
        grids.ABOVE,
        grids.UNCLEAR,
    ]


def test_both_models_stand_side_by_side_as_soon_as_both_have_run(write):
    write("lag")
    alone = staleness.RESULTS / "order.png"
    staleness.main()
    narrow = imread(alone).shape[1]
    write("smollm2", steps=60)
    staleness.main()
    assert imread(alone).shape[1] > narrow
    means, pairs = staleness.same_order()
    assert (
        means.startswith("- Kendall's τ of the levels of 5 losses at lag 16 is +")
        and "two-sided p 0." in means
    )
    assert pairs.startswith("- Of their 10 pairs ") and pairs.endswith(" of these the same way.")
    lines = staleness.cost("smollm2", "level")
    assert "of 10 intervals" in lines[-1] and not any(staleness.NOISE in line for line in lines)


def test_another_rate_is_compared_with_the_defaults_of_the_same_loss_and_seed(write, monkeypatch):
    write("lag")
    monkeypatch.setitem(COSTS, "grpo", 0.01)
    write("rates", lambda cell: cell["seed"] < 2)
    (too_few,) = staleness.rates()
    assert "`--study rates` has 62 of 93 runs, too few complete seeds" in too_few
    (staleness.RESULTS / "rates" / "cells.jsonl").unlink()
    (staleness.RESULTS / "rates").rmdir()
    write("rates")
    lines = staleness.rates()
    assert all(
        "\n  - Leave zero out after Holm's" in point and "`grpo` +0.1" in point
        for point in lines[:3]
    )
    assert lines[3] == ""
    assert lines[-1].startswith("Fresh, `grpo` has a level of ") and lines[-1].count("; ") == 3


def test_weights_count_from_when_they_are_made_however_late_their_samples_are_trained_on():
    record = {
        "series": {
            "reward": [0.0, 1.0, 0.5],
            "step_s": [1.0, 3.0, 10.0],
            "staleness_mean": [0.0] * 3,
        }
    }
    assert staleness.over_time(record, 0, 4) == pytest.approx(0.75)
    assert staleness.over_time(record, 3, 5) == pytest.approx(0.75)
    later = {
        "reward": [0.0, 0.0, 1.0, 0.5],
        "step_s": [1.0, 3.0, 10.0, 1.0],
        "staleness_mean": [0.0, 1.0, 1.0, 1.0],
    }
    assert staleness.over_time({"series": later}, 0, 4) == pytest.approx(0.75), (
        "the same versions, a step later"
    )


def test_at_equal_time_the_ratio_that_earns_more_is_named_with_its_interval(write):
    write("time")
    path = staleness.RESULTS / "time" / "cells.jsonl"
    records = grids.read_records(path)
    for record in records:  # rewards rise over steps, and at α = 2 a step takes half as long
        more = 0.001 * record["cell"]["seed"]
        record["series"]["reward"] = [0.01 * step * (1 + more) for step in range(80)]
        record["series"]["step_s"] = [0.5 if record["cell"]["async_ratio"] == 2 else 1.0] * 80
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    best = next(line for line in staleness.in_short() if line.startswith("- `grpo`"))
    assert best.startswith("- `grpo`: best at α = 2: +0.")
    assert best.endswith(" against α = 0, above zero, also after Holm's correction over 18.")
    # at α = 2 the last step samples version 78, which the next ends after 39.5 s
    runs = staleness.by_time(records)
    assert runs["seconds"].unique().tolist() == [39.5]
    assert runs.groupby("alpha")["steps"].first().to_dict() == {0.0: 39, 1.0: 39, 2.0: 79, 4.0: 39}
    assert "standard deviation of 0.0000, which is of the clock alone." in "".join(
        staleness.equal_time()
    )


def test_both_figures_show_something(write):
    write("lag")
    staleness.main()
    for name in ("lag.png", "order.png"):
        pixels = imread(staleness.RESULTS / name)
        assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


def test_the_table_of_losses_has_all_of_them():
    assert all(f"| `{name}` | " in blocks.losses() for name in LOSSES)
