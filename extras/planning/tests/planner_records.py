"""Where checks of the planner keep what they measured: results/planner, with PLANNER_RESULTS=results/planner set.

Without it nothing is written. Each check replaces its own records, and table.md is made of all that are there.
"""

import functools
import os
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path

from scripts.bench import harness
from scripts.bench.harness import ROOT, Column
from scripts.lines import markdown, read

PAPER: dict = tomllib.loads(
    Path(__file__).with_name("planner_paper.toml").read_text(encoding="utf-8")
)
BY_TABLE_1, MODELS = "rates of table 1", tuple(PAPER["models"])
SETS = (BY_TABLE_1, *(f"sheets by {name}" for name in PAPER["constants"]))
ABOUT = """\
What is checked is on top of each test, and extras/planning/README.md explains the model. Numbers of the paper,
AReaL-Hex (arXiv 2511.00796), and what is taken from it are in extras/planning/tests/planner_paper.toml. The load is
that of the time when the records were written, so that a check's own is in it."""

provenance = functools.cache(harness.provenance)
"""Of the time of the first record that is kept, when its check has run."""


def keep(file: str, records: list[dict]) -> None:
    """Add the records of the test in `file`, each with a case, an arm and the number of its repeat."""
    if not (folder := os.environ.get("PLANNER_RESULTS")):
        return
    path = Path(folder) / "planner.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = f"PLANNER_RESULTS={folder} python -m pytest {Path(file).resolve().relative_to(ROOT)}"
    for record in records:
        harness.add({**record, **provenance(), "command": command}, path, ("case", "arm"))
    write(path)


def write(path: Path) -> None:
    """Write table.md beside the records."""
    records = read(path)
    text = ["# The planner", "\n".join(harness.made_by(records)), ABOUT, *paragraphs(records)]
    path.with_name("table.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def shown(value: object) -> str:
    """A number with three digits; anything else as it is."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def paragraphs(records: list[dict]) -> Iterator[str]:
    """A heading and a table for each check that has records."""
    if rows := list(beside_the_paper(records)):
        heads = ["number", "model", "paper", *SETS]
        heads += ["taken from it in the first", "where they differ"]
        yield "## Beside AReaL-Hex\n\n" + PAPER["about"] + "\n\n" + "\n".join(markdown(heads, rows))
    if times := harness.rounds(records, "arm", case="time"):
        rows = {
            f"{name} ({rounds[0]['paper_s']:g} s)" if "paper_s" in rounds[0] else name: rounds
            for name, rounds in times.items()
        }
        columns = [Column("planning_s", "s", ".3f")]
        table = harness.table("cluster (table 5's scheduler)", rows, columns)
        yield "## Seconds of planning, 7B\n\n" + "\n".join(table)
    for case, columns in PAPER["columns"].items():
        rows = [record for record in records if record["case"] == case]
        cells = [[shown(row.get(name, "–")) for name in columns["fields"]] for row in rows]
        if rows:
            table = "\n".join(markdown(columns["fields"].values(), cells))
            yield "\n\n".join(filter(None, (f"## {columns['title']}", summary(rows), table)))


def beside_the_paper(records: list[dict]) -> Iterator[list[str]]:
    """Rows of the paper's numbers, and ours by each set of constants."""
    by_row = {(record["case"], record["arm"]): record for record in records}
    for row in PAPER["rows"]:
        for model in MODELS:
            record = by_row.get((f"paper {model}", row["what"]))
            if record is not None:
                numbers = [shown(float(record[name])) for name in ("paper", *SETS)]
                yield [row["what"], model, *numbers, row.get("input", "–"), row.get("note", "")]


def summary(rows: list[dict]) -> str:
    """How far predicted steps are from the others, and what the records say themselves of all of them."""
    sentences = list(dict.fromkeys(row["all"] for row in rows if "all" in row))
    for name in ("simulated_s", "step_s"):
        if {"predicted_s", name} <= rows[0].keys():
            errors = [row["predicted_s"] / row[name] - 1 for row in rows]
            sentences.append(
                f"Predicted over measured step − 1: median {statistics.median(errors):+.1%}, from {min(errors):+.1%} "
                f"to {max(errors):+.1%}, n = {len(errors)}."
            )
    return " ".join(sentences)
