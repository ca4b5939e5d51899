"""Tables of recorded runs: a stored one made again, and rows by any options."""

import shutil

from programs import ROOT, run_script

from scripts.runs import load
from scripts.table import table

RESULTS = ROOT / "results"


def test_the_table_of_the_recorded_runs_is_made_again(monkeypatch, capsys):
    runs = sorted(RESULTS.glob("staleness/a*-s*"))
    run_script(monkeypatch, "table.py", *runs, "--by", "async_ratio")
    assert capsys.readouterr().out == (RESULTS / "staleness/table.md").read_text()


def test_a_row_is_of_the_runs_that_share_its_values_and_made_as_many_steps(tmp_path):
    lags = sorted(RESULTS.glob("staleness/a*-s0"), reverse=True)
    short = shutil.copytree(lags[0], tmp_path / "short")
    metrics = short / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(True)[:30]))
    runs = [load(path) for path in (*lags, short, *RESULTS.glob("smollm2/one_digit-s*"))]
    lines = table(runs, ["async-ratio", "steps"])
    rows = [" ".join(line.strip("| ").split(" | ")[:4]) for line in lines if line[0] == "|"]
    assert rows[2:] == [
        "0 80 80 of 80 1", "1 38 38 of 38 3", "1 80 80 of 80 1", "2 80 80 of 80 1", "2 80 30 of 80 1",
    ]  # fmt: skip
    assert table(runs[:2], ["algo"])[-1] == "Runs of one row also differ in `async_ratio`."
    assert [line.split(" | ")[0] for line in table(runs[:3], [])[2:]] == [
        "| a2-s0",
        "| a1-s0",
        "| a0-s0",
    ]
