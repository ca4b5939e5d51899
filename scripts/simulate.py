"""The papers' comparisons at their scale, by simulation: `python scripts/simulate.py`.

A discrete-event simulation with a virtual clock. The Controller is the real one, with its SampleBuffer, TicketSource
and Dispatcher. Simulated are what a worker does between two messages, the speed of its engine and the time
to train (extras/simulation/). What is assumed: see the table and workload.py, engine.py and scenarios.toml.

    python scripts/simulate.py                          # everything: records and table in results/simulation
    python scripts/simulate.py --only scheduling        # some of them; the other records are kept
"""

import gc
import itertools
import time
from pathlib import Path

from extras.simulation import report as tables
from extras.simulation.cluster import Outcome, simulate
from extras.simulation.scenarios import Scenario, scenarios
from scripts.bench.harness import ROOT, provenance
from scripts.lines import run_command


def run(scenario: Scenario, seed: int) -> dict:
    """Simulate all arms of a scenario and return its record."""
    outcomes: dict[str, Outcome] = {}
    start = time.process_time()
    for arm in scenario.arms:
        outcomes[arm] = simulate(scenario.case(arm, outcomes, seed))
    arms = {
        arm: {name: float(f"{number:.6g}") for name, number in outcome.numbers.items()}
        for arm, outcome in outcomes.items()
    }
    cpu_s = round(time.process_time() - start, 1)
    return {
        "scenario": scenario.name,
        "tail": scenario.tail,
        "seed": seed,
        "arms": arms,
        "cpu_s": cpu_s,
    }


def main(
    out: Path = ROOT / "results" / "simulation",
    only: list[str] | None = None,
    seeds: int = 5,
    report: bool = False,
) -> None:
    """Run what was chosen, seed by seed, and write records and table.

    Args:
        out: Folder of the records.
        only: Mechanisms, or names of comparisons, see scenarios.toml.
        seeds: Runs of each arm (n), each with problems of its own.
        report: Simulate nothing, write the table again.
    """
    # Objects that live for a whole run make collections long, and all of them are kept.
    gc.set_threshold(100_000)
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    made_by = provenance()
    chosen_scenarios = [] if report else scenarios(only)
    for seed, scenario in itertools.product(range(seeds), chosen_scenarios):
        record = run(scenario, seed)
        tables.replace(record | made_by, out / "simulation.jsonl")
        values = " → ".join(f"{arm[scenario.measure]:.4g}" for arm in record["arms"].values())
        what = f"seed {seed}, {scenario.name}, tail {scenario.tail:g}"
        print(f"{what}: {values}  ({record['cpu_s']} s)", flush=True)
    tables.write(out)
    print(f"records: {out}")


if __name__ == "__main__":
    run_command(main)
