"""The map of stability, on a grid whose runs collapse where the test says."""

import numpy as np
import pytest
from matplotlib.image import imread
from programs import ROOT
from user_files import write_jsonl

from scripts import stability


def rewards_of(collapse_at):
    """Eighty rewards that rise to 0.9, and are 0.1 from a step on, from 1."""
    rewards = np.linspace(0.3, 0.9, 80)
    if collapse_at:
        rewards[collapse_at - 1 :] = 0.1
    return rewards


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        (rewards_of(None), None),
        (rewards_of(61), 61),
        (rewards_of(76), 76),
        (rewards_of(77), None),  # low for four steps only
        (rewards_of(61) * 0.5, None),  # had never learnt
        (np.r_[rewards_of(41)[:44], rewards_of(None)[44:]], None),  # recovers
        (np.r_[np.full(20, 0.8), np.full(60, 0.4)], None),  # exactly half
    ],
)
def test_a_collapse_is_half_of_the_best_for_five_steps(rewards, step):
    assert stability.collapse_step(rewards) == step


NOT_FINITE = (
    "error: loss nan and gradient norm nan at update 80 must be finite: look at the rewards"
)


def make_record(algo, lag, lr, seed, collapse_at=None):
    return {
        "cell": {"algo": algo, "async_ratio": 0.0, "publish_delay": lag, "seed": seed, "lr": lr},
        "options": [],
        "summary": {},
        "evaluations": [],
        "series": {
            "reward": rewards_of(collapse_at).tolist(),
            "staleness_mean": [min(step, lag) for step in range(80)],
        },
    }


def test_a_grid_gives_outcomes_and_the_line(tmp_path, capsys):
    records = []
    for algo in ("grpo", "tis"):
        for lag in (0, 4, 16):
            for lr in (0.001, 0.004):
                for seed in range(3):
                    collapses = lag == 16 and lr == 0.004 and (algo == "grpo" or seed == 0)
                    records.append(make_record(algo, lag, lr, seed, 51 if collapses else None))
    records[0] |= {"error": NOT_FINITE}  # grpo, lag 0, lr 0.001
    write_jsonl(tmp_path / "cells.jsonl", records)
    stability.main(tmp_path)
    page = (tmp_path / "stability.md").read_text()
    assert page == capsys.readouterr().out
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    grpo, tis, grpo_line, tis_line = rows
    assert grpo[1] == "**1 of 3 collapse**, step 80"
    assert grpo[6].startswith("**3 of 3 collapse**, step 51")
    assert tis[6].startswith("**1 of 3 collapse**, step 51")
    assert grpo_line[1:] == ["≥ 0.004, lag · lr ≥ 0.016", "0.001, lag · lr 0.016 |"]
    assert tis_line == ["| `tis`", *grpo_line[1:]]
    assert imread(tmp_path / "stability.png").shape[1] > 800


def test_a_grid_whose_runs_all_failed_has_a_map_of_collapses(tmp_path):
    records = [make_record("grpo", lag, 0.001, 0) | {"error": NOT_FINITE} for lag in (0, 4)]
    write_jsonl(tmp_path / "cells.jsonl", records)
    stability.main(tmp_path)
    page = (tmp_path / "stability.md").read_text()
    assert page.count("**1 of 1 collapse**, step 80") == 2
    assert (tmp_path / "stability.png").exists()


def test_losses_of_two_files_of_one_name_have_two_rows(tmp_path):
    records = [make_record(f"/{folder}/my.py:f", 0, 0.001, 0) for folder in "ab"]
    write_jsonl(tmp_path / "cells.jsonl", records)
    assert [*stability.read_runs(tmp_path)["loss"]] == ["/a/my.py:f", "/b/my.py:f"]


def test_the_tables_of_the_published_grid_are_made_again():
    published = (ROOT / "results/lag_lr/stability.md").read_text().splitlines()
    made = stability.page(stability.read_runs(ROOT / "results/lag_lr"))
    assert len(made) > 20 and {*made} <= {*published}


def test_a_grid_without_rates_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no grid with --sweep 'lr="):
        stability.read_runs(tmp_path)
