"""Ours against TRL on the same work, on the CPU: `python scripts/bench_peers.py`.

Model, task, reward, batch (32 groups of 8), token limits, optimizer (AdamW, 1e-3 after 5 steps of warm-up, clipped at
norm 1), clip range 0.2, float32 and the machine are the same for all. Works are in bench_work.py: on `natural` the
policy ends its responses, learning is real, and weights are kept every few steps and scored afterwards, on the same
256 held-out problems for all; on `short` and `long` lengths are forced, by the same law, and only speed is measured.
TRL comes into an environment of its own on top of .venv, so that torch, transformers and vLLM are the same ones.

Fairness. Each mode of TRL has the fastest settings found that are correct: one micro-batch per step; no gradient
checkpointing, bfloat16, saving, prompt shuffling or reference model. `generate` is transformers' with its cache; it
is on policy and needs no log-probs. `colocate` is vLLM in the trainer's process with our engine options, without the
importance correction, which would cost a forward pass to correct by 1e-6. `async` is TRL's asynchronous trainer and a
vLLM server with our engine options, its default staleness of 4, and 256 samples in each step. Where TRL cannot run
without a GPU, it gets the fastest that we have (bench_peers_cpu.py): weights through shared memory, torch's
attention, vLLM's reload. One thread and two are tried; what is compared is the best arm of each.

Each measurement is a run of its own: start, steps, end. Steady state is from the end of the first quarter of the
steps to the last step's end; by then what was sampled in advance, while the trainer was starting, is used up. Time to
an accuracy is from the start of the process to the weights that have it.

The limit of the machine for a work: the samples/s of an arm if it kept all cores busy at the CPU time per sample that
it takes; and for comparison generation alone (two workers of one thread) and training alone (two threads).
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from data.models import resolve_model
from scripts import bench_peers_report as report
from scripts.bench_rollout_report import append, provenance
from scripts.bench_work import MODEL_TASK, WORKS

ROOT = Path(__file__).resolve().parent.parent

PINS = ("trl==1.16.0", "accelerate==1.15.0")
"""What .venv lacks of TRL."""
TIMEOUT_S = 900.0
POLL_S = 2.0
STEPS = {"natural": 64, "short": 32, "long": 16}
SYNCHRONOUS_STEPS = {"natural": 64, "short": 32, "long": 6}
"""Of TRL's synchronous modes, which take up to ten times as long, and begin every step with nothing in store."""
SNAPSHOT_EVERY = 4
TINY_STEPS = 5
EVAL_PROBLEMS = 256


@dataclass(frozen=True)
class Arm:
    """One way to do a work."""

    name: str
    script: str
    options: tuple[str, ...]
    threads: int = 1
    """OMP_NUM_THREADS; ours places its threads itself."""
    learns: bool = True
    """Whether it does the whole work, and not half of it."""
    synchronous: bool = False

    def steps(self, work: str) -> int:
        """Steps of a run that is long enough for a steady state."""
        return (SYNCHRONOUS_STEPS if self.synchronous else STEPS)[work]

    @property
    def is_peer(self) -> bool:
        """Whether it runs in the peers' environment."""
        return self.script == "bench_peers_trl.py"


def _ours(name: str, *options: str, learns: bool = True) -> Arm:
    return Arm(name, "bench_peers_ours.py", options, learns=learns)


def _trl(mode: str, threads: int) -> Arm:
    name = f"TRL {mode}, {threads} thread{'s' * (threads > 1)}"
    return Arm(name, "bench_peers_trl.py", ("--mode", mode), threads, synchronous=mode != "async")


ARMS = {
    arm.name: arm
    for arm in (
        _ours("ours α=1", "--kind", "train", "--async-ratio", "1"),
        _ours("ours α=2", "--kind", "train", "--async-ratio", "2"),
        _ours("ours α=2, 2 workers", "--kind", "train", "--async-ratio", "2", "--num-workers", "2"),
        *(_trl(mode, threads) for mode in ("generate", "colocate") for threads in (1, 2)),
        _trl("async", 1),
        _ours("generation alone", "--kind", "generate", learns=False),
        _ours("training alone", "--kind", "learn", learns=False),
    )
}


# The peers' environment


def install(env: Path) -> None:
    """Make an environment that sees .venv's packages, and install TRL into it. Raises RuntimeError if that fails."""
    python = env / "bin" / "python"
    stamp = env / "-".join(["installed", *PINS])
    if stamp.exists():
        return
    print(f"installing {', '.join(PINS)} into {env}", flush=True)
    _succeed([sys.executable, "-m", "venv", "--clear", "--without-pip", str(env)])
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    ours, theirs = (_succeed([p, "-c", where]).strip() for p in (sys.executable, str(python)))
    Path(theirs, "base.pth").write_text(ours + "\n", encoding="utf-8")
    _succeed([sys.executable, "-m", "pip", "--python", str(python), "install", *PINS])
    stamp.touch()


def _succeed(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


# What a run uses


class Usage:
    """Watches the memory and CPU time of a process and its descendants, in a thread."""

    def __init__(self, pid: int):
        self.peak_memory = 0
        """Most that was seen, bytes."""
        self.cpu: list[tuple[float, float]] = []
        """(Unix time, seconds of CPU that those alive have used) now and then."""
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self.cpu.append((time.time(), tree_cpu(self._pid)))
            self.peak_memory = max(self.peak_memory, tree_memory(self._pid))

    def stop(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self._thread.join()

    def cores_busy(self, start: float, end: float) -> float:
        """Cores kept busy between two Unix times, up to the last look before the second: soon after it processes end,
        and what they used is not seen any more. 0 if nobody looked in between."""
        seen = [(time, seconds) for time, seconds in self.cpu if time <= end]
        if not seen or seen[-1][0] <= start:
            return 0.0
        at, used = zip(*seen, strict=True)
        return float(used[-1] - np.interp(start, at, used)) / (at[-1] - start)


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants that are alive."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_cpu(pid: int) -> float:
    """Seconds of CPU time of a process and its descendants."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            total += times.user + times.system
    return total


def tree_memory(pid: int) -> int:
    """Proportional set size of a process and its descendants, bytes: shared pages count once."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):  # it has just ended
            total += process.memory_full_info().pss
    return total


# One measurement


def measure(arm: Arm, work: str, steps: int, model_path: str, python: Path, keep: Path | None) -> dict:
    """Run an arm from start to end. Returns what its steps and its processes say.

    Raises RuntimeError, with the last lines of its log, if it fails or takes longer than TIMEOUT_S.
    """
    out = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    options = ["--work", work, "--steps", str(steps), "--out", str(out), *arm.options]
    if work == "natural" and arm.learns:
        options += ["--snapshot-every", str(min(SNAPSHOT_EVERY, steps))]
    if arm.is_peer:
        options += ["--model", model_path]
    interpreter = python if arm.is_peer else sys.executable
    command = [str(interpreter), str(ROOT / "scripts" / arm.script), *options]
    started_at = time.time()
    usage = run(command, environment(arm), out / "log")
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    found = {**steady_state(lines), "start_s": lines[0]["time"] - started_at}
    start, end = lines[len(lines) // 4]["time"], lines[-1]["time"]
    found["cores_busy"] = usage.cores_busy(start, end)
    found["cpu_ms_per_sample"] = 1e3 * found["cores_busy"] / found["samples_per_s"]
    found |= {"cores": len(os.sched_getaffinity(0)), "peak_memory_gb": usage.peak_memory / 1e9}
    if work == "natural" and arm.learns:
        found["curve"] = accuracy_curve(out, model_path, started_at)
        found["to_accuracy_s"] = report.seconds_to(found["curve"])
    if keep is not None:
        shutil.copytree(out, keep / f"{arm.name}-{work}", dirs_exist_ok=True)
    shutil.rmtree(out)
    return found


def environment(arm: Arm) -> dict[str, str]:
    """Variables that vLLM, torch and transformers read."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(arm.threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # TRL looks into the engine of its own process, and the asynchronous trainer's server has one of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if "colocate" in arm.options else "1",
    }


def run(command: list[str], environment: dict[str, str], log: Path) -> Usage:
    """Run a command to its end. Returns what it and its descendants used.

    Raises RuntimeError, with the last lines of its log, if it fails or takes longer than TIMEOUT_S.
    """
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    usage = Usage(process.pid)
    try:
        status = process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        status = f"none after {TIMEOUT_S:g} s"
    finally:
        usage.stop()
        _kill(process)
    if status:
        lines = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command)} ended with status {status}; its last lines, of {log}:\n{lines}")
    return usage


def _kill(process: subprocess.Popen) -> None:
    """End what is left of a run, if anything."""
    from cluster.processes import kill_session

    kill_session(process.pid)


def steady_state(lines: list[dict]) -> dict[str, float]:
    """Rates from the end of the first quarter of the steps to the end of the last one."""
    first = len(lines) // 4
    steady, seconds = lines[first + 1 :], lines[-1]["time"] - lines[first]["time"]
    samples, tokens = (sum(line[name] for line in steady) for name in ("samples", "tokens"))
    return {
        "step_s": seconds / len(steady),
        "samples_per_s": samples / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_sample": tokens / samples,
    }


def accuracy_curve(out: Path, model_path: str, started_at: float) -> list[tuple[int, float, float]]:
    """(step, seconds since the start, held-out accuracy) of each of the weights that a run kept."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from data.tasks import load_task
    from data.tiny import sampled_accuracy

    problems = load_task(MODEL_TASK, 0).eval_problems(EVAL_PROBLEMS)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    curve = []
    for path in [*out.glob("snapshots/step_*"), *out.glob("run/checkpoints/step_*")]:
        weights = path / "model.safetensors"
        model.load_state_dict(load_file(weights), strict=False)
        seconds = weights.stat().st_mtime - started_at
        curve.append((int(path.name.removeprefix("step_")), seconds, sampled_accuracy(model, problems)))
    return sorted(curve)


def main() -> None:
    """Read the command line, install, measure in turn, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help=f"of {', '.join(map(repr, ARMS))}")
    parser.add_argument("--repeats", type=int, default=3, help="runs per arm and work (n)")
    parser.add_argument("--append", action="store_true", help="keep earlier runs of the same arm and work")
    parser.add_argument("--env", type=Path, default=ROOT / ".peers", help="environment of TRL, made on first use")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "peers", help="folder of the records")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: only to see that it runs")
    parser.add_argument("--keep", type=Path, help="folder to keep the newest output of each arm in")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the table again")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        if not arguments.report:
            install(arguments.env.absolute())
            measure_all(arguments)
        report.write(arguments.out)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"records: {arguments.out}")


def measure_all(arguments: argparse.Namespace) -> None:
    """Every arm on every work, one after the other and again from the first; a line for each run.

    Earlier records of the same arm and work are replaced, or added to.
    """
    arms = [ARMS[name] for name in arguments.arms or ARMS]
    model_path, python = resolve_model("tiny", MODEL_TASK), arguments.env.absolute() / "bin" / "python"
    path, made_by = arguments.out / "peers.jsonl", provenance(arguments.size)
    for work in arguments.works:
        for repeat in range(arguments.repeats):
            for arm in arms:
                steps = arm.steps(work) if arguments.size == "full" else TINY_STEPS
                found = measure(arm, work, steps, model_path, python, arguments.keep)
                if repeat == 0 and not arguments.append:
                    report.forget(arm.name, work, path)
                what = {"arm": arm.name, "work": work, "steps": steps, "peer": PINS[0]}
                append({**what, **found, **made_by}, path)
                rates = f"{found['samples_per_s']:.0f} samples/s, {found['tokens_per_s']:.0f} tokens/s"
                print(f"{work}: {arm.name} {repeat + 1}/{arguments.repeats}  {rates}", flush=True)


if __name__ == "__main__":
    main()
