"""The notebook docs/lag.ipynb: its code cells run from the first to the last, in one process."""

import json

import pytest
from programs import ROOT

from asyncrl.config import words_of
from scripts.grids import LATE_COLUMNS
from scripts.lines import read
from scripts.runs import SUMMARY

BOOK = json.loads((ROOT / "docs/lag.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in BOOK["cells"] if cell["cell_type"] == "code"]


def run_cells(monkeypatch, out, **variables):
    """Run all code cells in the folder of the notebook; return their names."""
    monkeypatch.chdir(ROOT / "docs")
    for name, value in ({"LAG_OUT": str(out), "MPLBACKEND": "Agg"} | variables).items():
        monkeypatch.setenv(name, value)
    names = {}
    for cell in CELLS:
        exec(cell, names)
    return names


def test_the_notebook_draws_a_finished_grid(tmp_path, monkeypatch):
    """The records are of the study, so ablate.py starts no run. The tables of summaries, which
    those records lack, are empty."""
    with open(tmp_path / "cells.jsonl", "w") as lines:
        for record in read(ROOT / "results/study/lag/cells.jsonl"):
            cell = record["cell"]
            if cell["algo"] == "grpo" and cell["publish_delay"] in (0, 4) and cell["seed"] < 2:
                record["options"] = [*words_of(cell), "--steps", "40", "--eval-every", "0"]
                record["summary"] = dict.fromkeys([*SUMMARY, *LATE_COLUMNS])
                lines.write(json.dumps(record) + "\n")
    names = run_cells(monkeypatch, tmp_path)
    assert (tmp_path / "lag.png").stat().st_size > 10_000
    assert names["steps_of_runs"].groupby(["lag", "seed"]).size().tolist() == [80] * 4
    assert (names["level"][4] < names["level"][0]).mean() > 0.5, "lag costs grpo reward"


@pytest.mark.slow
@pytest.mark.e2e
def test_the_notebook_runs_its_grid(tmp_path, monkeypatch):
    names = run_cells(monkeypatch, tmp_path, LAG_STEPS="7", LAG_SEEDS="1")
    assert names["late"].groupby("lag")["version"].apply(list).to_dict() == {
        0: [4, 5, 6],
        4: [0, 1, 2],
    }
    assert (tmp_path / "paired.md").exists() and (tmp_path / "curves.png").exists()
