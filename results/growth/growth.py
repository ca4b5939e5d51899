"""Cost of a sample as a job grows: `PYTHONPATH=. .venv/bin/python results/growth/growth.py`.

A row changes one of three numbers: groups per step, rollout workers, or tokens of a response, which are forced. Each
row has a short and a long run of the default job. Their difference leaves out the start. Writes growth.jsonl and
growth.md.
"""

import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import train_async
from asyncrl.engine.proxy import LLMProxy
from asyncrl.job.command_line import parse_config
from rollout import run_worker, start_worker
from scripts.lines import markdown, provenance, read

FOLDER = Path(__file__).parent
GROUP_SIZE = 8
SHORT_STEPS = 4
LEAST_SAMPLES = 6000
"""Samples of the long run beyond those of the short one."""
BASE = {"groups": 32, "workers": 1, "tokens": 16}
CASES = [
    *(BASE | {"groups": groups} for groups in (8, 32, 128, 512)),
    *(BASE | {"workers": workers} for workers in (2, 4)),
    *(BASE | {"tokens": tokens} for tokens in (64, 256, 448)),
]


class ForcedLength(LLMProxy):
    """An engine whose responses all have one length."""

    async def generate(self, request_id, prompt_tokens, seed, max_tokens=None, prefix=None):
        length = min(int(os.environ["FORCED_LENGTH"]), max_tokens or sys.maxsize)
        return await super().generate(request_id, prompt_tokens, seed, length, prefix)

    async def run_request(self, engine_id, tokens, params):
        params.ignore_eos, params.stop_token_ids = True, []
        return await super().run_request(engine_id, tokens, params)


run_forced = functools.partial(
    run_worker, start=functools.partial(start_worker, start_proxy=ForcedLength.start)
)


def run(case: dict, steps: int) -> tuple[float, list[dict]]:
    """Run a job. Return its CPU time in seconds, of all its processes, and its metrics by step."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"--groups-per-step={case['groups']}", f"--num-rollout-workers={case['workers']}",
            f"--max-response-tokens={case['tokens']}", f"--steps={steps}", "--eval-every=0", "--save-every=None",
            f"--runs-dir={folder}", "--run-name=run",
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"FORCED_LENGTH": str(case["tokens"])}
        command = [sys.executable, __file__, "--run", *words]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return cpu_s, read(Path(folder) / "run/metrics.jsonl")


def measure(case: dict) -> dict:
    """Return a record: samples/s, tokens/s, and milliseconds of CPU time per sample."""
    per_step = case["groups"] * GROUP_SIZE
    more_steps = max(4, -(-LEAST_SAMPLES // per_step // (1 + case["tokens"] // 64)))
    short_s, _ = run(case, SHORT_STEPS)
    long_s, metrics = run(case, SHORT_STEPS + more_steps)
    seconds = sum(line["time/step_s"] for line in metrics[SHORT_STEPS:])
    samples = per_step * more_steps
    return case | {
        "steps": more_steps,
        "samples_per_s": samples / seconds,
        "tokens_per_s": samples * case["tokens"] / seconds,
        "cpu_ms_per_sample": 1000 * (long_s - short_s) / samples,
    }


def table(records: list[dict]) -> list[str]:
    """Return the lines of the table, the base case first in each part."""
    rows = []
    for name in BASE:
        others = [key for key in BASE if key != name]
        part = [record for record in records if all(record[key] == BASE[key] for key in others)]
        for record in sorted(part, key=lambda record: record[name]):
            numbers = (record["samples_per_s"], record["tokens_per_s"], record["cpu_ms_per_sample"])
            rows.append(
                [
                    name,
                    record[name],
                    *(f"{number:,.{d}f}" for number, d in zip(numbers, (0, 0, 2), strict=True)),
                ]
            )
    heading = ["what grows", "to", "samples/s", "sampled tokens/s", "CPU ms per sample"]
    return markdown(heading, rows)


def main() -> None:
    """Measure all cases, and write records and table."""
    records = []
    for case in CASES:
        records.append(measure(case))
        print(json.dumps(records[-1]), flush=True)
    lines = [json.dumps(line) + "\n" for line in (provenance() | {"n": 1, "base": BASE}, *records)]
    (FOLDER / "growth.jsonl").write_text("".join(lines), encoding="utf-8")
    (FOLDER / "growth.md").write_text("\n".join(table(records)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        train_async.train(parse_config(sys.argv[2:]), run_forced)
    else:
        main()
