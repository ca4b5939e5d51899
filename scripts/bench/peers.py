"""Ours against TRL on the same work, on the CPU: `python scripts/bench/peers.py`.

Model, task, prompts, reward, batch (32 groups of 8), token limits, optimizer (AdamW, 1e-3 after 5 steps of warm-up,
clipped at norm 1), clip range 0.2, float32 and the machine are the same for all. Works are in work.py: on `natural` the
policy ends its responses, and learning is real; on `short` and `long` lengths are forced, by the same law, and only
speed is measured. `smollm2` is the job of the small language model, 8 groups of 8 at 4e-5, in bfloat16 with float32
weights (ours by FSDP, TRL by autocast). An arm's runs have the seeds 0, 1, 2, … TRL comes into a folder of its own on
top of .venv, so that torch, transformers and vLLM are the same ones.

Fairness. Each mode of TRL has the fastest settings found that are correct: one micro-batch per step; no gradient
checkpointing, saving, prompt shuffling or reference model. `generate` is transformers' with its cache, on policy.
`async` is TRL's asynchronous trainer and a vLLM server with our engine options, and its default staleness of 4. Where
TRL cannot run without a GPU, it gets the fastest that we have (peers_cpu.py). What is compared is the best arm of each.

Each measurement is a run of its own. Steady state is from the end of the first quarter of the steps on, when what was
sampled while the trainer was starting is used up. The page also has `colocate`, vLLM in TRL's trainer, and the time to
a held-out accuracy, from the start of the process or of the engine. Weights were kept every few steps and scored later.
The code of both is in the history, at their records' commits.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from asyncrl.weights.models import resolve_model
from scripts.bench.harness import ROOT, Arm, Bench, Case, Column, main, rounds, run_process, table
from scripts.bench.work import WORKS, Work
from scripts.lines import markdown, read

PINS = ("trl==1.16.0", "accelerate==1.15.0")
"""What .venv lacks of TRL."""
TIMEOUT_S = 1200.0
TINY_STEPS = 5
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
AIMS = _TABLES["aims"]


@dataclass(frozen=True)
class Way:
    """What an arm runs to do a work."""

    mode: str = ""
    """Of TRL; ours has none."""
    threads: int = 1
    """OMP_NUM_THREADS; ours places its threads itself."""
    options: dict = field(default_factory=dict)
    """Of Config."""

    @property
    def is_peer(self) -> bool:
        """Whether it is TRL's."""
        return bool(self.mode)

    def steps(self, work: str) -> int:
        """Steps of a run that is long enough for a steady state."""
        return _TABLES["synchronous_steps" if self.mode == "generate" else "steps"][work]


WAYS = {name: Way(**fields) for name, fields in _TABLES["ways"].items()}


def install(folder: Path) -> None:
    """Install TRL into a folder, unless it is there. Raises ValueError if that fails."""
    if all((folder / f"{pin.replace('==', '-')}.dist-info").exists() for pin in PINS):
        return
    print(f"installing {', '.join(PINS)} into {folder}", flush=True)
    target = ["--no-deps", "--upgrade", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *target, *PINS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")


# One measurement


def measure(
    way: Way, work: Work, peers: Path, tiny: bool, seeds: Iterator[int], logs: Path
) -> dict:
    """Run from start to end, with TRL from the folder `peers`. Returns what its steps and its processes say."""
    steps, config, seed = TINY_STEPS if tiny else way.steps(work.name), work.config(), next(seeds)
    out = Path(tempfile.mkdtemp(prefix=f"{way.mode}-{work.name}-", dir=logs))
    options = {"work": work.name, "steps": steps, "out": str(out), "seed": seed, **way.options}
    if way.is_peer:
        options |= {"mode": way.mode, "model": resolve_model(config.model, config.task)}
    script = ROOT / "scripts" / "bench" / ("peers_trl.py" if way.is_peer else "peers_ours.py")
    command = [sys.executable, str(script), json.dumps(options)]
    started_at = time.time()
    looks = run(command, environment(way, peers), out / "log")
    up, *lines = read(out / "steps.jsonl")
    rates = steady_state(lines)
    busy = cores_busy(looks, lines[len(lines) // 4]["time"], lines[-1]["time"])
    return {
        "work": work.name, "steps": steps, "seed": seed, "peer": PINS[0], **rates,
        "up_s": up["time"] - started_at, "start_s": lines[0]["time"] - started_at,
        "cores_busy": busy, "cpu_ms_per_sample": 1e3 * busy / rates["samples_per_s"],
        "cores": len(os.sched_getaffinity(0)), "peak_memory_gb": max(memory for *_, memory in looks) / 1e9,
    }  # fmt: skip


def environment(way: Way, peers: Path) -> dict[str, str]:
    """Variables that Python, vLLM, torch and transformers read."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *[str(peers)] * way.is_peer]),
        "OMP_NUM_THREADS": str(way.threads), "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip


def run(
    command: list[str], environment: dict[str, str], log: Path
) -> list[tuple[float, float, int]]:
    """Run a command to its end. Returns what `look` saw now and then.

    Raises RuntimeError, with the last lines of its log, if it fails or takes longer than TIMEOUT_S.
    """
    looks = [(time.time(), 0.0, 0)]
    status = run_process(command, log, environment, TIMEOUT_S, lambda pid: looks.append(look(pid)))
    if status != 0:
        status_text = f"none after {TIMEOUT_S:g} s" if status is None else status
        lines = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        what = f"{' '.join(command)} ended with status {status_text}"
        raise RuntimeError(f"{what}; its last lines, of {log}:\n{lines}")
    return looks


def look(pid: int) -> tuple[float, float, int]:
    """Unix time, CPU time (s) and memory (bytes, shared pages once) of a process and its descendants that are alive."""
    at, cpu_s, memory = time.time(), 0.0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has just ended
                cpu_s += sum(process.cpu_times()[:2])  # user and system
                memory += process.memory_full_info().pss
    return at, cpu_s, memory


def cores_busy(looks: list[tuple[float, float, int]], start: float, end: float) -> float:
    """Cores kept busy between two Unix times, up to the last look before the second: soon after it processes end, and
    what they used is not seen any more. 0 if nobody looked in between."""
    seen = [(at, seconds) for at, seconds, _ in looks if at <= end]
    if not seen or seen[-1][0] <= start:
        return 0.0
    at, used = zip(*seen, strict=True)
    return float(used[-1] - np.interp(start, at, used)) / (at[-1] - start)


def steady_state(lines: list[dict]) -> dict[str, float]:
    """Rates from the end of the first quarter of the steps to the end of the last one."""
    first = len(lines) // 4
    steady, seconds = lines[first + 1 :], lines[-1]["time"] - lines[first]["time"]
    samples, tokens = (sum(line[name] for line in steady) for name in ("samples", "tokens"))
    rates = {"samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}
    return {"step_s": seconds / len(steady), **rates, "tokens_per_sample": tokens / samples}


# Tables

COLUMNS = (
    Column("samples_per_s", "samples/s", ".1f"), Column("tokens_per_s", "tokens/s", ".0f"),
    Column("tokens_per_sample", "tokens per sample", ".1f"), Column("cpu_ms_per_sample", "CPU ms per sample", ".1f"),
    Column("cores_busy", "cores busy"), Column("limit", "limit of the machine, samples/s", ".0f"),
    Column("to_accuracy_s", "s to held-out 0.8 (natural), 0.9 (smollm2)", ".0f"),
    Column("learning_s", "s with the engine up", ".0f"), Column("start_s", "s to the end of step 1", ".0f"),
    Column("peak_memory_gb", "peak memory, GB", ".1f"),
)  # fmt: skip


def arms_of(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """Work -> arm -> its records, with what it would do were all cores busy, and infinity if an aim was not reached."""
    completed = []
    for record in records:
        more = {"to_accuracy_s": None, "learning_s": None, "over_limit": None, "limit": None}
        if record.get("cores_busy"):
            more["over_limit"] = record["cores_busy"] / record["cores"]
            more["limit"] = record["samples_per_s"] / more["over_limit"]
        if "curve" in record:  # held-out accuracy over time
            more["to_accuracy_s"] = record["to_accuracy_s"] or math.inf
            if "up_s" in record:
                more["learning_s"] = more["to_accuracy_s"] - record["up_s"]
        completed.append(record | more)
    return {work: rounds(of_work, "arm") for work, of_work in rounds(completed, "work").items()}


def rate(found: list[dict]) -> float:
    """Median samples per second."""
    return statistics.median(r["samples_per_s"] for r in found)


def best(arms: dict[str, list[dict]], prefix: str) -> str | None:
    """The fastest arm whose name begins so."""
    return max(
        (name for name in arms if name.startswith(prefix)),
        key=lambda name: rate(arms[name]),
        default=None,
    )


RATIOS = {
    "over_peer": Column("over_peer", "÷ TRL", better=1),
    "over_limit": Column("over_limit", "÷ limit of the machine", better=1),
}


def ours(records: list[dict]) -> dict[str, list[dict]]:
    """Work -> records of our best arm, each with its ratio to the limit and to the run of TRL's best arm whose turn was
    beside it, as the machine's speed drifts; of works that both did."""
    found = {}
    for work, arms in arms_of(records).items():
        our, peer = best(arms, "ours"), best(arms, "TRL")
        if our and peer:
            rates = {(r["commit"], r["repeat"]): r["samples_per_s"] for r in arms[peer]}
            beside = ((r, rates.get((r["commit"], r["repeat"]))) for r in arms[our])
            found[work] = [{**r, "over_peer": r["samples_per_s"] / its} for r, its in beside if its]
    return {work: records for work, records in found.items() if records}


def summary(records: list[dict]) -> list[str]:
    """Markdown rows: on each work our best arm, TRL's best, what ours is over TRL's and of the machine's limit."""
    speed, *_, to_accuracy, learning, _, _ = COLUMNS
    columns, rows, works = (speed, *RATIOS.values(), to_accuracy, learning), [], arms_of(records)
    for work, of_work in ours(records).items():
        key, aim = AIMS[work]
        is_met = statistics.median(RATIOS[key].values(of_work)) >= aim
        aims = f"≥ {aim:g} {RATIOS[key].heading}", "yes" if is_met else "no"
        peer = best(works[work], "TRL")
        for name, found, said in (
            (of_work[0]["arm"], of_work, aims),
            (peer, works[work][peer], ("–", "–")),
        ):
            cells = (cell for column in columns for cell in column.cells(found, found))
            rows.append([work, name, str(len(found)), *cells, *said])
    return markdown(
        ["work", "best arms", "n", *(column.heading for column in columns), "aim", "reached"], rows
    )


def report(records: list[dict]) -> Iterator[str]:
    """The best arms, and then all of them, work by work."""
    yield "\n".join(summary(records))
    for work, arms in arms_of(records).items():
        yield "\n".join(table(work, arms, COLUMNS))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench alone."""
    parser.add_argument(
        "--arms", nargs="+", choices=WAYS, metavar="ARM", help=f"of {', '.join(map(repr, WAYS))}"
    )
    parser.add_argument(
        "--env", type=Path, default=ROOT / ".peers", help="folder of TRL, made on first use"
    )


def cases(given: argparse.Namespace) -> list[Case]:
    """Each work, done by each of the chosen arms."""
    names, peers = given.arms or list(WAYS), given.env.absolute()
    if any(WAYS[name].is_peer for name in names):
        install(peers)

    def arm(name: str, work: Work) -> Arm:
        run_once = functools.partial(
            measure, WAYS[name], work, peers, given.size == "tiny", itertools.count()
        )
        return Arm(name, lambda logs: contextlib.nullcontext(functools.partial(run_once, logs)))

    # one forced length
    grouped = {name for name in names if not WAYS[name].options.get("replicate_prompts", True)}
    able = [
        (w, [arm(name, w) for name in names if not (w.sigma and name in grouped)])
        for w in WORKS.values()
    ]
    return [Case(work.name, arms, warm_up=0) for work, arms in able]


BENCH = Bench(
    "peers", "Ours and TRL on the same work", cases, report, key=("work", "arm"), shown="samples_per_s", repeats=3,
    add_options=add_options,
)  # fmt: skip

if __name__ == "__main__":
    main(BENCH)
