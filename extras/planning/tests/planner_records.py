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


def keep(file: str, records: list[dict]) -> None:
    """Add the records of the test in `file`, each with a case, an arm and the number of its repeat."""
    if not (folder := os.environ.get("PLANNER_RESULTS")):
        return
    path = Path(folder) / "planner.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = f"PLANNER_RESULTS={folder} python -m pytest {Path(file).resolve().relative_to(ROOT)}"
    made = provenance() | {"command": command}
    for record in records:
        harness.add({**record, **made}, path, ("case", "arm"))
    write(path)


provenance = functools.cache(harness.provenance)
"""Of the time of the first record that is kept, when its check has run."""


def write(path: Path) -> None:
    """Write table.md beside the records."""
    records = read(path)
    text = ["# The planner", "\n".join(harness.made_by(records)), ABOUT, *paragraphs(records)]
    path.with_name("table.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


ABOUT = """\
What is checked is on top of each test, and extras/planning/README.md explains the model. Numbers of the paper,
AReaL-Hex (arXiv 2511.00796), and what is taken from it are in extras/planning/tests/planner_paper.toml. The load is
that of the time when the records were written, so that a check's own is in it."""


def shown(value: object) -> str:
    """A number with three digits; anything else as it is."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def paragraphs(records: list[dict]) -> Iterator[str]:
    """A heading and a table for each check that has records."""
    if rows := list(beside_the_paper(records)):
        heads = [
            "number",
            "model",
            "paper",
            *SETS,
            "taken from it in the first",
            "where they differ",
        ]
        yield "## Beside AReaL-Hex\n\n" + PAPER["about"] + "\n\n" + "\n".join(markdown(heads, rows))
    if times := harness.rounds(records, "arm", case="time"):
        rows = {
            f"{name} ({of[0]['paper_s']:g} s)" if "paper_s" in of[0] else name: of
            for name, of in times.items()
        }
        table = harness.table(
            "cluster (table 5's scheduler)", rows, [Column("planning_s", "s", ".3f")]
        )
        yield "## Seconds of planning, 7B\n\n" + "\n".join(table)
    for case, of in PAPER["columns"].items():
        found = [r for r in records if r["case"] == case]
        cells = ([shown(r.get(name, "–")) for name in of["fields"]] for r in found)
        if found:
            table = "\n".join(markdown(of["fields"].values(), cells))
            yield "\n\n".join(filter(None, (f"## {of['title']}", summary(found), table)))


SETS = (BY_TABLE_1, *(f"sheets by {name}" for name in PAPER["constants"]))


def beside_the_paper(records: list[dict]) -> Iterator[list[str]]:
    """Rows of the paper's numbers, and ours by each set of constants."""
    of = {(r["case"], r["arm"]): r for r in records}
    for row in PAPER["rows"]:
        for model in (model for model in MODELS if (f"paper {model}", row["what"]) in of):
            found = of[f"paper {model}", row["what"]]
            numbers = (shown(float(found[name])) for name in ("paper", *SETS))
            yield [row["what"], model, *numbers, row.get("input", "–"), row.get("note", "")]


def summary(found: list[dict]) -> str:
    """How far predicted steps are from the others, and what the records say themselves of all of them."""
    said = dict.fromkeys(r["all"] for r in found if "all" in r)
    names = [
        name for name in ("simulated_s", "step_s") if "predicted_s" in found[0] and name in found[0]
    ]
    for name in names:
        errors = [r["predicted_s"] / r[name] - 1 for r in found]
        said[
            f"Predicted over measured step − 1: median {statistics.median(errors):+.1%}, from {min(errors):+.1%} to "
            f"{max(errors):+.1%}, n = {len(errors)}."
        ] = None
    return " ".join(said)
