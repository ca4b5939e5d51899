"""What a sample costs as a run grows: more groups a step, longer responses, more workers.

    PYTHONPATH=. .venv/bin/python results/growth/growth.py              # adds records, and makes growth.md

Each case is a run of the tiny model with its default options on this machine. Every response has the same forced
length. Wall time and CPU time of all processes are read when a line of metrics.jsonl appears. The first quarter of the
steps is left out. If a cost grows no faster than the run, the time of a sample stays as it was, or falls. A stopped
measurement continues where it stopped.

Plan: `growth` of a case is its time per sample ÷ that of the case before it. For responses it is per token. Two rounds,
the second backwards. A case grows too fast if both rounds have a CPU time above 1.1 times that of the case before it.
"""

import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

import train_async
from asyncrl.engine.proxy import LLMProxy
from asyncrl.job.command_line import parse_config
from rollout import run_worker, start_worker
from scripts.lines import markdown, provenance, read

FOLDER = Path(__file__).parent
GROUP_SIZE = 8
ROUNDS = 2
FAMILIES = {
    "groups a step": [(8, 16, 1, 128), (32, 16, 1, 48), (128, 16, 1, 16), (512, 16, 1, 8)],
    "tokens a response": [(32, 16, 1, 48), (32, 64, 1, 32), (32, 256, 1, 12), (32, 448, 1, 8)],
    "workers": [(32, 64, 1, 32), (32, 64, 2, 32)],  # two cores take no third engine
}
"""Cases by what grows: groups a step, tokens a response, workers, and the steps of the run."""
GROWING = {"groups a step": 0, "tokens a response": 1, "workers": 2}


class ForcedLength(LLMProxy):
    """An engine whose responses all have the longest allowed length."""

    async def run_request(self, engine_id, tokens, params):
        params.ignore_eos, params.stop_token_ids = True, []
        return await super().run_request(engine_id, tokens, params)


run_forced = functools.partial(
    run_worker, start=functools.partial(start_worker, start_proxy=ForcedLength.start)
)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its living descendants."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:2])
        except psutil.Error:  # it has just ended
            continue
    return total


def measure(groups: int, length: int, workers: int, steps: int) -> dict:
    """Run a case. Returns samples/s and CPU milliseconds a sample, from a quarter of the steps on."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "groups-per-step": groups, "group-size": GROUP_SIZE, "max-response-tokens": length,
            "num-rollout-workers": workers, "steps": steps, "eval-every": 0, "save-every": None,
            "runs-dir": folder, "run-name": "run",
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        process = subprocess.Popen([sys.executable, __file__, "--run", *words])
        looks = []
        while process.poll() is None:
            metrics = Path(folder, "run/metrics.jsonl")
            num_lines = metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0
            if num_lines > len(looks):
                look = (time.monotonic(), cpu_seconds(process.pid))
                looks += [look] * (num_lines - len(looks))
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{words} ended with status {process.returncode}")
    (first_s, first_cpu_s), (last_s, last_cpu_s) = looks[steps // 4 - 1], looks[-1]
    samples = (len(looks) - steps // 4) * groups * GROUP_SIZE
    return {
        "groups": groups, "tokens": length, "workers": workers, "steps": steps,
        "samples_per_s": samples / (last_s - first_s),
        "cpu_ms_per_sample": 1e3 * (last_cpu_s - first_cpu_s) / samples,
    }  # fmt: skip


def table(records: list[dict]) -> list[str]:
    """Return the lines of growth.md."""
    lines = []
    for family, cases in FAMILIES.items():
        rows, before = [], {}
        for groups, length, workers, _ in cases:
            matches = [
                r
                for r in records
                if (r["groups"], r["tokens"], r["workers"]) == (groups, length, workers)
            ]
            per_unit = length if family == "tokens a response" else 1
            costs = {r["round"]: r["cpu_ms_per_sample"] / per_unit for r in matches}
            growth = ", ".join(
                f"{costs[number] / before[number]:.2f}" for number in costs if number in before
            )
            rates = ", ".join(f"{r['samples_per_s']:.0f}" for r in matches)
            cpu = ", ".join(f"{r['cpu_ms_per_sample']:.2f}" for r in matches)
            rows.append(((groups, length, workers)[GROWING[family]], rates, cpu, growth or "–"))
            before = costs
        unit = "token" if family == "tokens a response" else "sample"
        heading = [family, "samples/s", "CPU ms a sample", f"growth of CPU time a {unit}"]
        lines += [*markdown(heading, rows), ""]
    return [*lines, "A cell has a number for each round.", ""]


def make_page() -> None:
    """Write growth.md from the records."""
    records = sorted(read(FOLDER / "growth.jsonl"), key=lambda record: record["round"])
    (FOLDER / "growth.md").write_text("\n".join(table(records)), encoding="utf-8")


def main() -> None:
    """Measure all cases in each round, and write records and table."""
    cases = list(dict.fromkeys(case for family in FAMILIES.values() for case in family))
    path = FOLDER / "growth.jsonl"
    done = {(r["round"], r["groups"], r["tokens"], r["workers"]) for r in read(path)}
    for number in range(ROUNDS):
        for case in cases[:: (-1) ** number]:
            if (number, *case[:3]) in done:
                continue
            record = provenance() | {"round": number} | measure(*case)
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(record["samples_per_s"], record["cpu_ms_per_sample"], case, flush=True)
    make_page()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        train_async.train(parse_config(sys.argv[2:]), run_forced)
    else:
        main()
