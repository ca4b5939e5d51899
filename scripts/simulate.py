"""The papers' comparisons at their scale, by simulation: `python scripts/simulate.py`.

A discrete-event simulation with a virtual clock. The Controller is the real one, with its SampleBuffer, TicketSource
and Dispatcher. Simulated are what a worker does between two messages, the speed of its engine and the time
to train (extras/simulation/). What is assumed: see the table and workload.py, engine.py and scenarios.toml.

    python scripts/simulate.py                          # everything: records and table in results/simulation
    python scripts/simulate.py --only scheduling        # some of them; the other records are kept
"""

import argparse
import gc
import itertools
import time
from pathlib import Path

from extras.simulation import report
from extras.simulation.cluster import Outcome, simulate
from extras.simulation.scenarios import Scenario, scenarios
from scripts.bench.harness import ROOT, provenance


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


def main() -> None:
    """Read the command line, run what was chosen, seed by seed, and write records and table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "simulation", help="folder of the records"
    )
    parser.add_argument(
        "--only", nargs="+", help="mechanisms, or names of comparisons, see scenarios.toml"
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="runs of each arm (n), each with problems of its own"
    )
    parser.add_argument(
        "--report", action="store_true", help="simulate nothing, write the table again"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # objects that live for a whole run make collections long, and all of them are kept
    gc.set_threshold(100_000)
    try:
        if arguments.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
        made_by, wanted = provenance(), [] if arguments.report else scenarios(arguments.only)
        for seed, scenario in itertools.product(range(arguments.seeds), wanted):
            made = run(scenario, seed)
            report.replace(made | made_by, arguments.out / "simulation.jsonl")
            values = " → ".join(f"{arm[scenario.measure]:.4g}" for arm in made["arms"].values())
            print(
                f"seed {seed}, {scenario.name}, tail {scenario.tail:g}: {values}  ({made['cpu_s']} s)",
                flush=True,
            )
        report.write(arguments.out)
    except ValueError as error:
        parser.error(str(error))
    print(f"records: {arguments.out}")


if __name__ == "__main__":
    main()
