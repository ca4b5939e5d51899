"""Machines that join a run, on one host: `python scripts/bench/swarm.py --only PART`; swarm.toml has the numbers.

sockets   a Controller and its Swarm against 200 sockets whose engines only sleep and answer, ever sooner
joined    one joined machine against one local worker, each sampling the work `long` for a trainer that does not compute
churn     the default job by one local worker, and by three machines that die, stop, leave and join at random
modes     α = 0 (sequential pull) and α = 1 (asynchronous push-pull) by one joined machine, and by a local worker
delta     what brings a machine from one version to the next while a policy learns: tiny, and --models
refresh   the same over a link of 10 Mbit/s (network namespace, tbf), from the announcement to sampling with it
unequal   two joined machines, one held to a third of a core by a cgroup: who samples how much

Weights are sent in bf16 where there is no job, and all differ from those before. An engine has one thread, local or
joined. Churn and modes are repeated with other seeds. `refresh` and `unequal` want the rights of root.
"""

import argparse
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import torch

from cluster.processes import freeze_garbage
from config import Config
from data.models import resolve_model
from data.records import Trajectory
from job import swarm as job_swarm
from job.publisher import connect_workers
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arm, Bench, Case, Column
from scripts.bench.parts import make_sequences
from scripts.bench.rig import Rig, Weights, load_weights, one_rank, running, specs_of
from scripts.bench.swarm_machines import Machine, run_sleepers
from scripts.bench.work import LONG, NATURAL, run_work_worker
from scripts.lines import read
from scripts.runs import evaluations, load
from trainer.batch import distribute
from trainer.policy import load_policy
from weights.delta import apply_delta, digest_of
from weights.pull import PullTransport

PARTS: dict[str, dict] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
UP_S = 300.0
"""Time that machines have until their engines are up."""

Measure = Callable[[], dict]


# Rigs


class SwarmRig(Rig):
    """A rig that publishes other weights each time, in bf16; machines may sample for it."""

    def connect(self) -> None:
        """Wait for the engines here, and let machines in."""
        self.weights = [(name, weight.bfloat16()) for name, weight in load_weights(self.node.model_path)]
        connect_workers(self.node, specs_of(self.weights))

    def publish(self, weights: Weights | None = None) -> None:
        """Publish weights, or the same with other signs, under the next version."""
        self.weights = weights or [(name, -weight) for name, weight in self.weights]
        super().publish()
        if self.node.swarm is not None:
            self.node.swarm.take_answered()  # as the trainer does that verifies

    def await_workers(self, count: int) -> None:
        """Wait until so many workers are up. Raises RuntimeError if they are not after UP_S."""
        deadline = time.monotonic() + UP_S
        while sum(worker.is_up for worker in list(self.controller.workers)) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not {count} workers after {UP_S:g} s: {self.controller.describe()}")
            time.sleep(0.05)

    def counted(self) -> dict[str, float]:
        """So far: seconds of CPU of this process, bytes that machines were sent, and that came from them."""
        found = self.node.swarm.take_report() if self.node.swarm else {}
        mb = {way: found.get(f"swarm/mb_{way}", 0.0) for way in ("sent", "received")}
        return {"trainer_cpu_s": time.process_time(), **{f"bytes_{way}": 1e6 * mb[way] for way in mb}}


def free_address(host: str = "127.0.0.1") -> str:
    """HOST:PORT where nobody listens."""
    with socket.socket() as free:
        free.bind((host, 0))
        return f"{host}:{free.getsockname()[1]}"


@contextmanager
def swarm(config: Config, folder: Path, part: dict, who: list[str]) -> Iterator[tuple[SwarmRig, list[Machine]]]:
    """A rig and the machines that sample for it, each within what the part says of it; they join in that order.

    Without machines a worker here samples, or whoever else joins where the config says that the rig listens.
    """
    with ExitStack() as on_end:
        for command in part.get("undo", []):
            on_end.callback(subprocess.run, command, shell=True, capture_output=True)
        for command in part.get("make", []):
            subprocess.run(command, shell=True, check=True)
        address, machines = config.listen or free_address(part.get("host", "127.0.0.1")), []
        if who or config.listen:
            config = replace(config, num_rollout_workers=0, listen=address, swarm_args=("verify_share=0", *(f"refresh_lag={part['lags'][who[0]]}" for _ in range(bool(who and "lags" in part)))))
        rig = on_end.enter_context(running(SwarmRig(config, run_work_worker, folder)))
        for index, name in enumerate(who):
            log = folder / f"machine_{index}.log"
            machines.append(Machine(address, folder / "swarm.key", log, part.get(name, [])))
            on_end.callback(machines[-1].end)
            rig.await_workers(index + 1)
        yield rig, machines


# joined, unequal


@contextmanager
def sampling(part: dict, who: list[str], logs: Path) -> Iterator[Measure]:
    """An arm that samples the work `long`: by machines, or by a worker here if there are none."""
    with swarm(LONG.config(**part["options"]), logs / ("-".join(who) or "local"), part, who) as (rig, machines):
        yield partial(sample, rig, machines, part["steps"])


def sample(rig: SwarmRig, machines: list[Machine], steps: int) -> dict:
    """Samples per second over some steps, what each of them cost, and the first machine's share of them."""
    count = lambda: {  # noqa: E731
        **rig.counted(), "machine_cpu_s": sum(sum(machine.process.cpu_times()[:2]) for machine in machines)
    }  # fmt: skip
    for _ in range(2):
        rig.step()  # it waits already
    before, start, since = count(), time.monotonic(), time.time()
    samples = [trajectory for _ in range(steps) for group in rig.step() for trajectory in group.trajectories]
    seconds, after = time.monotonic() - start, count()
    rig.wait_until_idle()
    events = [e for e in read(rig.node.run.path / "events.jsonl") if e["event"] == "trajectory" and e["time"] > since]
    first = [event["worker"] == 0 for event in events if event["time"] < since + seconds]
    costs = {name: (after[name] - before[name]) / len(samples) for name in after}
    return {"samples_per_s": len(samples) / seconds, **costs, "share_of_first": sum(first) / len(first)}


def stop_where_forced() -> None:
    """Have responses pass that end where their length was forced: no honest machine cuts one before the longest."""
    mistake_in = job_swarm.mistake_in

    def lenient(trajectory: Trajectory, *of) -> str | None:
        forced = trajectory.finish_reason == "length"
        return mistake_in(replace(trajectory, finish_reason="stop") if forced else trajectory, *of)

    job_swarm.mistake_in = lenient


# sockets


@contextmanager
def sleeping(part: dict, logs: Path) -> Iterator[Measure]:
    """A rig whose machines only sleep and answer; a measurement goes through all times to sleep."""
    context, each = get_context("spawn"), part["machines"] // part["processes"]
    config = NATURAL.config(**part["options"], listen=free_address())
    with swarm(config, logs / "rig", part, []) as (rig, _), ExitStack() as on_end:
        pipes, of = [], (config.listen, str(logs / "rig/swarm.key"), each, config.max_response_tokens)
        for _ in range(part["processes"]):
            ours, theirs = context.Pipe()
            context.Process(target=run_sleepers, args=(theirs, *of), daemon=True).start()
            theirs.close()
            pipes.append(on_end.enter_context(ours))
        rig.await_workers(each * len(pipes))
        freeze_garbage()  # as a run does before its first step
        rig.publish()
        yield lambda: {f"{sleep_s:g} s": pace(rig, pipes, sleep_s, part["seconds"]) for sleep_s in part["sleeps_s"]}


def pace(rig: SwarmRig, pipes: list, sleep_s: float, seconds: float) -> dict:
    """Messages per second, both ways, the time from an answer to the next ticket, and the leader's CPU time."""
    is_over = threading.Event()

    def train() -> None:
        while not is_over.wait(0.01):
            if rig.controller.take_batch_if_ready() is not None:
                rig.publish()
                rig.controller.take_report()
                rig.counted()

    trainer = threading.Thread(target=train)
    trainer.start()
    for pause_s in (seconds / 2 + sleep_s, seconds):  # first until all machines have that pace
        for pipe in pipes:
            pipe.send(sleep_s)
        start, before, version = time.monotonic(), cpu_of_threads(), rig.version
        time.sleep(pause_s)
    for pipe in pipes:
        pipe.send(None)
    found, spent, after = [pipe.recv() for pipe in pipes], time.monotonic() - start, cpu_of_threads()
    is_over.set()
    trainer.join()
    cpu, latencies = [after[i] - before.get(i, 0.0) for i in after], np.concatenate([waits for _, waits in found])
    rates = {"messages": sum(count for count, _ in found), "answers": len(latencies), "versions": rig.version - version}
    rates |= {"leader_cpu": sum(cpu), "busiest_thread_cpu": max(cpu)}
    waits = {f"p{percent}_s": float(np.percentile(latencies, percent)) for percent in (50, 99)}
    return waits | {f"{name}_per_s": count / spent for name, count in rates.items()}


def cpu_of_threads() -> dict[int, float]:
    """Seconds of CPU of each thread of this process so far."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


# delta, refresh


def learning(model: str, lr: float) -> Iterator[Weights]:
    """Weights in bf16 after each step of a policy that learns on the same sequences."""
    config = NATURAL.config(model=model, lr=lr, warmup=0)
    path = resolve_model(model, config.task)
    updates = distribute([make_sequences(config, path)], 1, config.max_tokens_per_microbatch)[0]
    policy = load_policy(config, path, torch.device("cpu"))
    while True:
        policy.train_step(updates, 0)
        yield [(name, weight.bfloat16()) for name, weight in policy.named_full_parameters()]


@contextmanager
def pulling(model: str, lr: float, logs: Path) -> Iterator[Measure]:
    """Steps of a policy; what each version has of bytes, whole and as a delta, and seconds at both ends."""
    versions, numbers = learning(model, lr), itertools.count(1)
    transport = PullTransport(specs_of(first := next(versions)))
    transport.stage(0, first)

    def measure() -> dict:
        version = next(numbers)
        base, payload = version - 1, transport.open(version - 1, None)[1].copy()
        digest = transport.stage(version, next(versions)).messages[0]["digest"]
        times = [time.perf_counter()]
        is_delta, stream = transport.open(version, base)
        times.append(time.perf_counter())
        if is_delta:
            apply_delta(stream, base, payload)
            if digest_of(payload) != digest:
                raise RuntimeError(f"the delta to version {version} leads elsewhere")
        times.append(time.perf_counter())
        digest_of(payload)
        times.append(time.perf_counter())
        seconds = dict(zip(("delta_open_s", "delta_take_s", "whole_take_s"), np.diff(times), strict=True))
        return {"delta_bytes": len(stream), "whole_bytes": len(payload), **seconds}

    yield measure


@contextmanager
def refreshing(model: str, logs: Path) -> Iterator[Measure]:
    """A machine behind a slow link, to which weights come that are all new, or of a policy's next step."""
    versions = {f"lr {lr:g}": learning(model, lr) for lr in PARTS["delta"]["lrs"]}
    with swarm(NATURAL.config(model=model), logs / "rig", PARTS["refresh"], ["far"]) as (rig, _):

        def refresh(weights: Weights | None = None) -> dict:
            before = rig.counted()["bytes_sent"]
            rig.publish(weights)
            rig.wait_until_idle()
            spent, seconds = rig.counted()["bytes_sent"] - before, rig.update_seconds(rig.version - 1)
            return {"bytes": spent, "refresh_s": max(seconds)}

        yield lambda: {
            "all new": refresh(),
            **{name: [refresh(next(weights)) for _ in range(2)][1] for name, weights in versions.items()},
        }


# churn, modes


@contextmanager
def job(part: dict, options: dict, logs: Path) -> Iterator[Measure]:
    """A whole run of train_async.py."""
    yield lambda: run_job(logs / f"job-{len(list(logs.iterdir()))}", part, **options)


def run_job(folder: Path, part: dict, machines: int, **options) -> dict:
    """Run a job to its end by so many machines, or by a local worker if there are none; what its records say."""
    if machines:
        options |= {"num_rollout_workers": 0, "listen": free_address()}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "train_async.py", f"--runs-dir={folder}", "--run-name=run", *given]
    environment, run, joined = os.environ | {"OMP_NUM_THREADS": "1"}, folder / "run", []
    metrics = run / "metrics.jsonl"
    folder.mkdir()
    with open(folder / "output", "w") as output, ExitStack() as on_end:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment)
        on_end.callback(process.kill)
        while machines and not (run / "swarm.key").exists() and process.poll() is None:
            time.sleep(0.1)
        for index in range(machines):
            joined.append(Machine(options["listen"], run / "swarm.key", folder / f"machine_{index}.log"))
            on_end.callback(joined[-1].end)
        churn = Churn(joined, options["steps"], part, options["seed"])
        while process.poll() is None:
            time.sleep(0.1)
            churn.turn(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
    if process.returncode:
        raise RuntimeError(f"a job ended with status {process.returncode}: {(folder / 'output').read_text()[-2000:]}")
    return {**of_run(run), "events": churn.events}


class Churn:
    """What happens to machines at random steps: one is killed, stopped for a while, told to leave, or joins again."""

    def __init__(self, machines: list[Machine], steps: int, part: dict, seed: int):
        self.machines, self.stop_s, self.random = machines, part.get("stop_s"), random.Random(seed)
        count = part.get("num_events", 0) * bool(machines)
        self.todo = sorted(self.random.sample(range(steps // 20, steps - steps // 20), count))
        self.back_at = dict.fromkeys(range(len(machines)), 0.0)  # infinity for one that has to join again
        self.events: list[tuple[int, str, int]] = []

    def turn(self, step: int) -> None:
        """Let happen what is due after a step; one machine at least stays."""
        now = time.monotonic()
        for index in [index for index, at in self.back_at.items() if 0 < at < now]:
            self.machines[index].signal(signal.SIGCONT)
            self.back_at[index] = 0.0
        up, gone = ([i for i, at in self.back_at.items() if at == when] for when in (0.0, float("inf")))
        if not self.todo or step < self.todo[0] or (len(up) < 2 and not gone):
            return
        self.todo.pop(0)
        if gone and (len(up) < 2 or self.random.random() < 0.5):
            index, what, back_at = self.random.choice(gone), "join", 0.0
            self.machines[index].start()
        else:
            index, what = self.random.choice(up), self.random.choice(["SIGKILL", "SIGSTOP", "SIGTERM"])
            self.machines[index].signal(signal.Signals[what])
            back_at = now + self.stop_s if what == "SIGSTOP" else float("inf")
        self.back_at[index] = back_at
        self.events.append((step, what, index))


def of_run(path: Path) -> dict:
    """What a run's records say of it; it ended well, so its ledger was balanced and no token too old at any step."""
    run = load(path)
    metrics, accuracies = run.metrics, evaluations(run.metrics)
    return {
        "seed": run.info["config"]["seed"],
        "accuracy": float(accuracies.iloc[-3:].mean()),
        "accuracies": {int(version): round(value, 4) for version, value in accuracies.items()},
        "rewards": [round(float(reward), 4) for reward in metrics["reward/mean"]],
        "steps_per_s": float(1 / metrics["time/step_s"].median()),
        "seconds": float(metrics["time/step_s"].sum()),
        "staleness_max": int(metrics["staleness/max"].max()),
        "staleness_mean": float(metrics["staleness/mean"].mean()),
        "swarm": {n: float(metrics[n].iloc[-1]) for n in metrics if n.startswith("swarm/") and n.count("/") == 1},
    }


def against_first(found: dict[str, dict]) -> Iterator[dict]:
    """Each run, and how far its accuracy, and its rewards on average, are from those of the first of its α."""
    for arm, of in found.items():
        first = next(found[name] for name in found if name[:5] == arm[:5] or "," not in arm)
        apart = [abs(one - other) for one, other in zip(of["rewards"], first["rewards"], strict=True)]
        yield {"arm": arm, **of, "accuracy_gap": of["accuracy"] - first["accuracy"], "reward_gap": np.mean(apart)}


# Cases and tables


def by_arm(found: dict[str, dict]) -> Iterator[dict]:
    """A record of each thing that the one arm measured."""
    yield from ({"arm": name, **of} for name, of in found["all"].items())


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """All parts."""
    yield Case("sockets", [Arm("all", partial(sleeping, PARTS["sockets"]))], by_arm, warm_up=0)
    for name, part in ((name, PARTS[name]) for name in ("joined", "unequal")):
        yield Case(name, [Arm(arm, partial(sampling, part, who)) for arm, who in part["arms"].items()])
    for name, part in ((name, PARTS[name]) for name in ("churn", "modes")):
        for options in (part["options"] | {"seed": seed} for seed in part["seeds"]):
            arms = [Arm(arm, partial(job, part, options | of)) for arm, of in part["arms"].items()]
            yield Case(f"{name} {options['seed']}", arms, against_first, warm_up=0)
    for model in ("tiny", *given.models):
        arms = [Arm(f"lr {lr:g}", partial(pulling, model, lr)) for lr in PARTS["delta"]["lrs"]]
        yield Case(f"delta {Path(model).name}", arms, warm_up=3)
        yield Case(f"refresh {Path(model).name}", [Arm("all", partial(refreshing, model))], by_arm)


def table(records: list[dict], name: str) -> list[str]:
    """Markdown lines of a part, all its seeds together, or of `delta MODEL`."""
    of_case = [r for r in records if name in (r["case"], r["case"].split()[0])]
    columns = [Column(*column) for column in PARTS[name.split()[0]]["columns"]]
    return harness.table(name, harness.rounds(of_case, "arm"), columns)


def report(records: list[dict]) -> Iterator[str]:
    """Paragraphs of the page."""
    for name in dict.fromkeys(r["case"].removesuffix(f" {r.get('seed')}") for r in records):
        yield "\n".join(table(records, name))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Models beside the tiny one."""
    parser.add_argument("--models", nargs="*", default=[], help="folders of models, for delta and refresh")


BENCH = Bench("swarm", "Machines that join", cases, report, ("case", "arm"), "repeat", add_options=add_options)

if __name__ == "__main__":
    torch.set_num_threads(1)
    stop_where_forced()
    with one_rank():
        harness.main(BENCH)
