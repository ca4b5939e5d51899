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
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import torch

from config import Config
from controller.ledger import DROP_REASONS
from data.messages import Piece
from data.models import resolve_model
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
from weights.pull import PIECE_BYTES, PullTransport
from weights.puller import Puller

PARTS: dict[str, dict] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
UP_S = 300.0
"""Time that machines have until their engines are up."""

Measure = Callable[[], dict]


# Rigs


class SwarmRig(Rig):
    """A rig that publishes other weights each time, in bf16; machines may sample for it."""

    def connect(self) -> None:
        """Wait for the engines here, and let machines in."""
        torch.set_num_threads(1)
        self.weights = [(name, weight.bfloat16()) for name, weight in load_weights(self.node.model_path)]
        connect_workers(self.node, specs_of(self.weights))

    def publish(self, weights: Weights | None = None) -> None:
        """Publish weights, or the same with other signs, under the next version."""
        self.weights = [(name, weight.bfloat16() if weights else -weight) for name, weight in weights or self.weights]
        super().publish()

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
def swarm(config: Config, folder: Path, part: dict, who: Iterable[str]) -> Iterator[tuple[SwarmRig, list[Machine]]]:
    """A rig for which machines sample, each within what the part says of it, and they; they join in that order."""
    with ExitStack() as on_end:
        for command in part.get("undo", []):
            on_end.callback(subprocess.run, command, shell=True, capture_output=True)
        for command in part.get("make", []):
            subprocess.run(command, shell=True, check=True)
        address, machines = free_address(part.get("host", "127.0.0.1")), []
        config = replace(config, num_rollout_workers=0, listen=address, swarm_args=("verify_share=0",))
        rig = on_end.enter_context(running(SwarmRig(config, run_work_worker, folder)))
        for index, name in enumerate(who):
            log = folder / f"machine_{index}.log"
            machines.append(Machine(address, folder / "swarm.key", log, part.get(name, [])))
            on_end.callback(machines[-1].end)
            rig.await_workers(index + 1)
        yield rig, machines


@contextmanager
def sampling(part: dict, who: tuple[str, ...], logs: Path) -> Iterator[Measure]:
    """An arm that samples the work `long`: by machines, or by a worker here if there are none."""
    options, folder = LONG.config(**part["options"]), logs / "-".join(who or ("local",))
    start = swarm(options, folder, part, who) if who else running(SwarmRig(options, run_work_worker, folder))
    with start as rig:
        yield partial(sample, *(rig if who else (rig, [])), part["steps"])


def sample(rig: SwarmRig, machines: list[Machine], steps: int) -> dict:
    """Samples per second over some steps, what each of them cost, and which worker sampled how many."""
    used = lambda: sum(sum(machine.process.cpu_times()[:2]) for machine in machines)  # noqa: E731
    for _ in range(2):
        rig.step()  # it waits already
    before, start, since = rig.counted() | {"machine_cpu_s": used()}, time.monotonic(), time.time()
    count = sum(len(group.trajectories) for _ in range(steps) for group in rig.step())
    seconds, after = time.monotonic() - start, rig.counted() | {"machine_cpu_s": used()}
    rig.wait_until_idle()
    events = [e for e in read(rig.node.run.path / "events.jsonl") if e["event"] == "trajectory" and e["time"] > since]
    sampled = [sum(e["worker"] == i and e["time"] < since + seconds for e in events) for i in range(len(machines))]
    return {"samples_per_s": count / seconds, **{k: (after[k] - before[k]) / count for k in after}, "sampled": sampled}


def against_local(found: dict[str, dict]) -> Iterator[dict]:
    """The speed of each as a share of a local worker's."""
    for arm, of in found.items():
        yield {"arm": arm, **of, "of_local": of["samples_per_s"] / found["local"]["samples_per_s"]}


def shares(found: dict[str, dict]) -> Iterator[dict]:
    """What each of two machines sampled beside the other, and what its share is of both speeds alone."""
    sampled, alone = found["both"]["sampled"], [found[who]["samples_per_s"] for who in ("slow", "fast")]
    for who, count, speed in zip(("slow", "fast"), sampled, alone, strict=True):
        share = {"share": count / sum(sampled), "share_alone": speed / sum(alone), "alone_per_s": speed}
        yield {"arm": who, **share, "both_of_sum": found["both"]["samples_per_s"] / sum(alone)}


# sockets


@contextmanager
def sleeping(part: dict, logs: Path) -> Iterator[Measure]:
    """A rig whose machines only sleep and answer; a measurement goes through all times to sleep."""
    context, each = get_context("spawn"), part["machines"] // part["processes"]
    with swarm(NATURAL.config(**part["options"]), logs / "rig", part, ()) as (rig, _), ExitStack() as on_end:
        pipes, of = [], (rig.config.listen, str(logs / "rig/swarm.key"), each, rig.config.max_response_tokens)
        for _ in range(part["processes"]):
            ours, theirs = context.Pipe()
            context.Process(target=run_sleepers, args=(*of, theirs), daemon=True).start()
            theirs.close()
            pipes.append(on_end.enter_context(ours))
        rig.await_workers(each * len(pipes))
        rig.publish()
        yield lambda: {f"{sleep_s:g} s": pace(rig, pipes, sleep_s, part["seconds"]) for sleep_s in part["sleeps_s"]}


def pace(rig: SwarmRig, pipes: list, sleep_s: float, seconds: float) -> dict:
    """Messages per second, both ways, the time from an answer to the next ticket, and the leader's CPU time."""
    is_over = threading.Event()

    def train() -> None:
        while not is_over.wait(0.01):
            if rig.controller.take_batch_if_ready() is not None:
                rig.publish()

    def begin() -> None:
        for pipe in pipes:
            pipe.send(sleep_s)

    with ThreadPoolExecutor(1) as trainer:
        training = trainer.submit(train)
        begin()
        time.sleep(seconds / 2 + sleep_s)  # until all machines have that pace
        begin()
        start, before, version = time.monotonic(), cpu_of_threads(), rig.version
        time.sleep(seconds)
        for pipe in pipes:
            pipe.send(None)
        found, spent, after = [pipe.recv() for pipe in pipes], time.monotonic() - start, cpu_of_threads()
        is_over.set()
        training.result()
    cpu = [(used - before.get(thread, 0.0)) / spent for thread, used in after.items()]
    latencies = np.concatenate([latencies for _, latencies in found])
    rates = {"messages": sum(count for count, _ in found), "answers": len(latencies), "versions": rig.version - version}
    waits = {f"p{percent}_s": float(np.percentile(latencies, percent)) for percent in (50, 99)}
    per_s = {f"{name}_per_s": count / spent for name, count in rates.items()}
    return {**per_s, **waits, "leader_cpu": sum(cpu), "busiest_thread_cpu": max(cpu)}


def cpu_of_threads() -> dict[int, float]:
    """Seconds of CPU of each thread of this process so far."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


# delta, refresh


class Learner:
    """A policy that learns, step after step, on the same sequences."""

    def __init__(self, model: str, lr: float):
        config = NATURAL.config(model=model, lr=lr, warmup=0)
        path = resolve_model(model, config.task)
        self.updates = distribute([make_sequences(config, path)], 1, config.max_tokens_per_microbatch)[0]
        self.policy = load_policy(config, path, torch.device("cpu"))
        for _ in range(PARTS["delta"]["steps"]):
            self.step()

    def step(self) -> Weights:
        """Make a step; the weights after it, in bf16."""
        self.policy.train_step(self.updates, 0)
        return [(name, weight.bfloat16()) for name, weight in self.policy.named_full_parameters()]


@contextmanager
def pulling(model: str, lr: float, logs: Path) -> Iterator[Measure]:
    """Steps of a policy; each version as a delta and whole, from the trainer's end to the puller's."""
    learner, versions = Learner(model, lr), iter(range(10**9))
    transport = PullTransport(specs_of(learner.step()))
    new_puller = lambda: Puller(transport.init_info(), lambda pull: None)  # noqa: E731
    kept = new_puller()

    def measure() -> dict:
        info = transport.stage(next(versions), learner.step()).messages[0]
        ways = {"whole": pull(transport, new_puller(), info), "delta": pull(transport, kept, info)}
        return {f"{name}_{key}": value for name, way in ways.items() for key, value in way.items()}

    yield measure


def pull(transport: PullTransport, puller: Puller, info: dict) -> dict:
    """Bring a version to a puller; bytes, and seconds at the trainer and at the machine."""
    start, version = time.perf_counter(), info["version"]
    puller.want(info)
    is_delta, stream = transport.open(version, puller.here and puller.here.version)
    opened = time.perf_counter()
    for offset in range(0, len(stream), PIECE_BYTES):
        data = bytes(memoryview(stream)[offset : offset + PIECE_BYTES])
        puller.take(Piece(version, is_delta, len(stream), offset, data))
    if puller.here.digest != info["digest"]:
        raise RuntimeError(f"version {version} did not arrive")
    return {"bytes": len(stream), "open_s": opened - start, "take_s": time.perf_counter() - opened}


@contextmanager
def refreshing(model: str, logs: Path) -> Iterator[Measure]:
    """A machine behind a slow link, to which weights come that are all new, or of a policy's next step."""
    learners = {f"lr {lr:g}": Learner(model, lr) for lr in PARTS["delta"]["lrs"]}
    with swarm(NATURAL.config(model=model), logs / "rig", PARTS["refresh"], ["far"]) as (rig, _):

        def refresh(weights: Weights | None) -> dict:
            before = rig.counted()["bytes_sent"]
            rig.publish(weights)
            rig.wait_until_idle()
            return {
                "bytes": rig.counted()["bytes_sent"] - before,
                "refresh_s": max(rig.update_seconds(rig.version - 1)),
            }

        def measure() -> dict:
            found = {"all new": refresh(None)}
            for name, learner in learners.items():
                refresh(learner.step())
                found[name] = refresh(learner.step())
            return found

        yield measure


# churn, modes


@contextmanager
def job(part: dict, options: dict, logs: Path) -> Iterator[Measure]:
    """A whole run of train_async.py: what its records say, and what happened to its machines."""
    folder = logs / f"job-{len(list(logs.iterdir()))}"
    folder.mkdir()
    yield lambda: run_job(folder, part, **options)


def run_job(folder: Path, part: dict, machines: int, **options) -> dict:
    """Run a job to its end by so many machines, or by a local worker if there are none."""
    if machines:
        options |= {"num_rollout_workers": 0, "listen": free_address()}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "train_async.py", f"--runs-dir={folder}", "--run-name=run", *given]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run, joined = folder / "run", []
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
            churn.turn(len(read(run / "metrics.jsonl", [])))
    if process.returncode:
        raise RuntimeError(f"a job ended with status {process.returncode}: {(folder / 'output').read_text()[-2000:]}")
    return {**of_run(run), "events": churn.events}


class Churn:
    """What happens to machines at random steps: one is killed, stopped for a while, told to leave, or joins again."""

    def __init__(self, machines: list[Machine], steps: int, part: dict, seed: int):
        self.machines, self.stop_s, self.random = machines, part.get("stop_s"), random.Random(seed)
        count = part.get("num_events", 0) * bool(machines)
        self.todo = sorted(self.random.sample(range(steps // 20, steps - steps // 20), count))
        self.back_at = dict.fromkeys(range(len(machines)), 0.0)
        """When each is there again: infinity for one that has to join again."""
        self.events: list[tuple[int, str, int]] = []

    def turn(self, step: int) -> None:
        """Let happen what is due after a step; one machine at least is never touched."""
        now = time.monotonic()
        for index in [index for index, at in self.back_at.items() if 0 < at < now]:
            self.machines[index].signal(signal.SIGCONT)
            self.back_at[index] = 0.0
        up, gone = ([i for i, at in self.back_at.items() if at == when] for when in (0.0, float("inf")))
        if not self.todo or step < self.todo[0] or (len(up) < 2 and not gone):
            return
        self.todo.pop(0)
        if gone and (len(up) < 2 or self.random.random() < 0.5):
            index, what = self.random.choice(gone), "join"
            self.machines[index].start()
            self.back_at[index] = 0.0
        else:
            index, what = self.random.choice(up), self.random.choice(["SIGKILL", "SIGSTOP", "SIGTERM"])
            self.machines[index].signal(signal.Signals[what])
            self.back_at[index] = now + self.stop_s if what == "SIGSTOP" else float("inf")
        self.events.append((step, what, index))


def of_run(path: Path) -> dict:
    """What a run's records say of it. Raises RuntimeError if a token was too old, or the ledger does not balance."""
    run = load(path)
    metrics, config = run.metrics, Config.from_dict(run.info["config"])
    for unit, source in (("groups", "issued"), ("tokens", "generated")):
        ends = ("consumed", "resident", *(f"dropped_{reason}" for reason in DROP_REASONS))
        if not (metrics[f"ledger/{unit}_{source}"] == sum(metrics[f"ledger/{unit}_{end}"] for end in ends)).all():
            raise RuntimeError(f"{path}: the ledger of {unit} does not balance")
    if metrics["staleness/max"].max() > config.max_staleness:
        raise RuntimeError(f"{path}: a token is {metrics['staleness/max'].max()} versions old")
    accuracies, of_swarm = evaluations(metrics), ("joins", "leaves", "late", "shut_out", "mb_sent", "mb_received")
    return {
        "seed": config.seed,
        "accuracy": statistics.fmean(accuracies.iloc[-3:]),
        "accuracies": {int(version): round(value, 4) for version, value in accuracies.items()},
        "rewards": [round(float(reward), 4) for reward in metrics["reward/mean"]],
        "steps_per_s": float(1 / metrics["time/step_s"].median()),
        "seconds": float(metrics["time/step_s"].sum()),
        "staleness_max": int(metrics["staleness/max"].max()),
        "staleness_mean": float(metrics["staleness/mean"].mean()),
        "swarm": {name: float(metrics[f"swarm/{name}"].iloc[-1]) for name in of_swarm if f"swarm/{name}" in metrics},
    }


def against_first(found: dict[str, dict]) -> Iterator[dict]:
    """Each run, and how far its accuracy, and its rewards on average, are from those of the first of its α."""
    for arm, of in found.items():
        first = next(found[name] for name in found if name[:5] == arm[:5] or "," not in arm)
        apart = [abs(one - other) for one, other in zip(of["rewards"], first["rewards"], strict=True)]
        gaps = {"accuracy_gap": of["accuracy"] - first["accuracy"], "reward_gap": statistics.fmean(apart)}
        yield {"arm": arm, **of, **gaps}


# Cases and tables


def by_arm(found: dict[str, dict]) -> Iterator[dict]:
    """A record of each thing that the one arm measured."""
    yield from ({"arm": name, **of} for name, of in found["all"].items())


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """All parts."""
    yield Case("sockets", [Arm("all", partial(sleeping, PARTS["sockets"]))], by_arm, warm_up=0)
    for name, records in (("joined", against_local), ("unequal", shares)):
        arms = [Arm(arm, partial(sampling, PARTS[name], tuple(who))) for arm, who in PARTS[name]["arms"].items()]
        yield Case(name, arms, records)
    for name, part in ((name, PARTS[name]) for name in ("churn", "modes")):
        for seed in part["seeds"]:
            options = part["options"] | {"seed": seed}
            arms = [Arm(arm, partial(job, part, options | of)) for arm, of in part["arms"].items()]
            yield Case(f"{name} {seed}", arms, against_first, warm_up=0, repeats=1)
    for model in ("tiny", *given.models):
        arms = [Arm(f"lr {lr:g}", partial(pulling, model, lr)) for lr in PARTS["delta"]["lrs"]]
        yield Case(f"delta {Path(model).name}", arms)
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
    with one_rank():
        harness.main(BENCH)
