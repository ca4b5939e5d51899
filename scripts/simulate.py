"""Simulate runs at a scale that no machine here has: `python scripts/simulate.py`.

The Controller is the real one, with its SampleBuffer, TicketSource and Dispatcher, on a virtual clock. Workers between
two messages, speeds of engines and times of training are simulated (extras/simulation/).

    python scripts/simulate.py                          # all: records and table in results/simulation
    python scripts/simulate.py --only scale             # one study; other records are kept
"""

import gc
import itertools
import time
from pathlib import Path

import pandas as pd

from extras.simulation import studies
from extras.simulation.cluster import simulate
from extras.simulation.studies import Setting
from scripts.lines import ROOT, markdown, provenance, read, replace_record, run_command

PAGE = Path(studies.__file__).with_name("page.md")
KEY = ("study", "setting", "seed")


def run(setting: Setting, seed: int) -> dict:
    """Simulate a setting and return its record."""
    start = time.process_time()
    outcome = simulate(setting.case(seed))
    numbers = {name: float(f"{number:.6g}") for name, number in outcome.numbers.items()}
    cpu_s = round(time.process_time() - start, 1)
    place = {"study": setting.study, "setting": setting.name, "seed": seed}
    return place | {"numbers": numbers, "cpu_s": cpu_s}


def table(study: dict, records: list[dict]) -> list[str]:
    """Return the lines of a study's table: means and ranges of the seeds."""
    runs = pd.DataFrame([record["numbers"] | record for record in records]).set_index("seed")
    names, measure = [setting["name"] for setting in study["settings"]], study["measure"]
    columns, rows = [measure, *study.get("columns", [])], []
    base = runs[runs["setting"] == names[0]][measure]
    for setting in study["settings"]:
        numbers = runs[runs["setting"] == setting["name"]][columns]
        ratio = numbers[measure] / base
        ratio = 1 / ratio if measure == "rollout_s" else ratio
        cells = [shown(numbers[column]) for column in columns]
        rows.append(
            [setting["name"], *cells, shown(ratio), setting.get("paper", "–"), len(numbers)]
        )
    heading = [study["name"], *columns, f"times better than {names[0]}", "paper", "n"]
    return markdown(heading, rows)


def shown(values: pd.Series) -> str:
    """Return mean and range as text."""
    numbers = [values.mean(), values.min(), values.max()]
    mean, low, high = (f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in numbers)
    return mean if low == high else f"{mean} ({low}–{high})"


def write(folder: Path) -> None:
    """Write table.md: page.md with a table of each study. Raises ValueError if simulation.jsonl is empty."""
    path = folder / "simulation.jsonl"
    records = read(path)
    if not records:
        raise ValueError(f"{path} has no records; run python scripts/simulate.py first")
    made_by = dict.fromkeys(
        f"`{r['command']}`: commit {r['commit']}{', with changes' * r['dirty']}; {r['hardware']}."
        for r in records
    )
    lines = [PAGE.read_text(encoding="utf-8"), *made_by]
    for name, study in studies.read_studies().items():
        runs = [record for record in records if record["study"] == name]
        lines += ["", *table(study, runs)] if runs else []
    (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(
    out: Path = ROOT / "results" / "simulation",
    only: list[str] | None = None,
    seeds: int = 3,
    report: bool = False,
) -> None:
    """Run the studies seed by seed, and write records and table.

    Args:
        out: Folder of the records.
        only: Names of studies, see extras/simulation/studies.toml.
        seeds: Runs of each setting (n), each with different problems.
        report: Only write the table again.
    """
    # Objects live for a whole run, so collections are long and useless.
    gc.set_threshold(100_000)
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    made_by = provenance()
    chosen = [] if report else studies.settings(only)
    for seed, setting in itertools.product(range(seeds), chosen):
        record = run(setting, seed)
        replace_record(record | made_by, out / "simulation.jsonl", KEY)
        measured = record["numbers"][setting.fields["measure"]]
        place = f"seed {seed}, {setting.study}, {setting.name}"
        print(f"{place}: {measured:.4g} ({record['cpu_s']} s)", flush=True)
    write(out)
    print(f"records: {out}")


if __name__ == "__main__":
    run_command(main)
