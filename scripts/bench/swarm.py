"""Machines that join a run, on one host: `python scripts/bench/swarm.py --only PART`; swarm.toml has the numbers.

sockets   a Controller and its Swarm against 200 sockets whose engines only sleep and answer, ever shorter
joined    one joined machine against one local worker, each sampling the work `long` for a trainer that does not compute
churn     the default job: one local worker against three machines that die, stop, leave and join at random
modes     α = 0 (sequential pull) and α = 1 (asynchronous push-pull) by one joined machine, against a local worker
delta     what brings a machine from one version to the next in bf16 while the tiny model, or --models, learns
refresh   the same over a link of 10 Mbit/s (network namespace, tbf), from the announcement to sampling with it
unequal   two joined machines, one held to a third of a core by a cgroup: who samples how much

Published weights all differ from those before, where there is no trainer. An engine has one thread, local or joined.
Repeats of churn and modes are seeds, one each.
"""

import argparse
import json
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
from scripts.bench.swarm_machines import Machine, run_sleepers, set_up
from scripts.bench.work import LONG, NATURAL, run_work_worker
from scripts.lines import read
from scripts.runs import evaluations, load
from trainer.batch import distribute
from trainer.policy import load_policy
from weights.pull import PIECE_BYTES, PullTransport
from weights.puller import Puller
from weights.transport import ParameterSpec

PARTS: dict[str, dict] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
UP_S = 300.0
"""Time that a machine has until its engine is up."""

Measure = Callable[[], dict]


# Rigs


class SwarmRig(Rig):
    """A rig whose weights all change from version to version, as with a trainer; machines may sample for it."""

    def connect(self) -> None:
        """Let machines in, or wait for the engines here."""
        torch.set_num_threads(1)
        self.weights = self.weights_at_start()
        connect_workers(self.node, specs_of(self.weights))

    def weights_at_start(self) -> Weights:
        """Those of the model."""
        return load_weights(self.node.model_path)

    def publish(self) -> None:
        """Publish other weights, by a little, under the next version."""
        for _, weight in self.weights:
            weight.mul_(1 + 1e-4)
        super().publish()

    def counted(self) -> dict[str, float]:
        """Bytes that machines were sent, and that came from them, so far; seconds of CPU of this process."""
        cpu = {"trainer_cpu_s": time.process_time()}
        if self.node.swarm is None:
            return cpu
        found = self.node.swarm.take_report()
        return cpu | {f"bytes_{way}": 1e6 * found[f"swarm/mb_{way}"] for way in ("sent", "received")}


class Bf16Rig(SwarmRig):
    """A rig that is given its weights, and sends them in bf16."""

    def weights_at_start(self) -> Weights:
        """Those of the model, in bf16."""
        return [(name, weight.bfloat16()) for name, weight in super().weights_at_start()]

    def refresh(self, weights: Weights) -> dict:
        """Publish weights; seconds until the machine samples with them, and bytes that it was sent for it."""
        before, self.weights = self.counted(), [(name, weight.bfloat16()) for name, weight in weights]
        Rig.publish(self)
        self.wait_until_idle()
        spent = self.counted()["bytes_sent"] - before["bytes_sent"]
        return {"refresh_s": max(self.update_seconds(self.version - 1)), "bytes": spent}


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def swarm(options: Config, folder: Path, within: Iterable[list[str]], kind=SwarmRig, host="127.0.0.1") -> Iterator:
    """A rig for which machines sample, one for each of `within`, and they; they join in that order."""
    alone = {"num_rollout_workers": 0, "listen": f"{host}:{free_port()}", "swarm_args": ("verify_share=0",)}
    with running(kind(replace(options, **alone), run_work_worker, folder)) as rig, ExitStack() as on_end:
        machines, key = [], folder / "swarm.key"
        for index, before in enumerate(within):
            machines.append(Machine(rig.config.listen, key, folder / f"machine_{index}.log", before))
            on_end.callback(machines[-1].end)
            await_workers(rig, index + 1)
        yield rig, machines


def await_workers(rig: Rig, count: int) -> None:
    """Wait until so many workers are up. Raises RuntimeError if they are not after UP_S."""
    deadline = time.monotonic() + UP_S
    while sum(worker.is_up for worker in list(rig.controller.workers)) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not {count} workers after {UP_S:g} s: {rig.controller.describe()}")
        time.sleep(0.05)


# joined, unequal


def sample(rig: SwarmRig, machines: list[Machine], steps: int) -> dict:
    """Samples per second over some steps, and what each of them cost; and of the machines, who sampled how many."""
    for _ in range(2):
        rig.step()  # it waits already
    used = lambda: sum(sum(machine.process.cpu_times()[:2]) for machine in machines)  # noqa: E731
    before, of_machines, start, since = rig.counted(), used(), time.monotonic(), time.time()
    count = sum(len(group.trajectories) for _ in range(steps) for group in rig.step())
    seconds = time.monotonic() - start
    costs = {name: (value - before[name]) / count for name, value in rig.counted().items()}
    costs |= {"machine_cpu_s": (used() - of_machines) / count} if machines else {}
    events = [e for e in read(rig.node.run.path / "events.jsonl") if e["event"] == "trajectory" and e["time"] > since]
    sampled = [sum(event["worker"] == index for event in events) for index in range(max(1, len(machines)))]
    rig.wait_until_idle()
    return {"samples_per_s": count / seconds, **costs, "sampled": sampled}


@contextmanager
def sampling(part: str, within: tuple[str, ...] | None, logs: Path) -> Iterator[Measure]:
    """An arm that samples the work `long`: by machines within what the part calls so, or by a worker here if None."""
    options, folder = LONG.config(**PARTS[part]["options"]), logs / f"rig-{'-'.join(within or ('local',))}"
    if within is None:
        with running(SwarmRig(options, run_work_worker, folder)) as rig:
            yield lambda: sample(rig, [], PARTS[part]["steps"])
    else:
        with swarm(options, folder, [PARTS[part].get(name, []) for name in within]) as (rig, machines):
            yield lambda: sample(rig, machines, PARTS[part]["steps"])


def against_local(found: dict[str, dict]) -> Iterator[dict]:
    """A machine's speed as a share of a local worker's."""
    for arm, of in found.items():
        yield {"arm": arm, **of, "of_local": of["samples_per_s"] / found["local"]["samples_per_s"]}


def shares(found: dict[str, dict]) -> dict:
    """What the slow one of two machines sampled, and what its share is of both speeds alone."""
    (slow, fast), alone = found["both"]["sampled"], [found[who]["samples_per_s"] for who in ("slow", "fast")]
    speeds = {"slow_per_s": alone[0], "fast_per_s": alone[1], "both_per_s": found["both"]["samples_per_s"]}
    share = {"share": slow / (slow + fast), "share_of_speed": alone[0] / sum(alone)}
    yield {"arm": "slow machine", **speeds, **share, "of_sum": speeds["both_per_s"] / sum(alone)}


# sockets


@contextmanager
def sleeping(size: dict, logs: Path) -> Iterator[Measure]:
    """A rig whose machines only sleep and answer; each measurement goes through all times to sleep."""
    context, folder = get_context("spawn"), logs / "sockets"
    with swarm(NATURAL.config(**size["options"]), folder, ()) as (rig, _), ExitStack() as on_end:
        pipes, each = [], size["machines"] // size["processes"]
        for _ in range(size["processes"]):
            ours, theirs = context.Pipe()
            of = rig.config.listen, str(folder / "swarm.key"), each, rig.config.max_response_tokens, theirs
            context.Process(target=run_sleepers, args=of, daemon=True).start()
            theirs.close()
            on_end.callback(ours.close)
            pipes.append(ours)
        await_workers(rig, each * len(pipes))
        rig.publish()
        yield lambda: {f"{s:g} s": rate(rig, pipes, s, size["seconds"]) for s in size["sleeps_s"]}


def rate(rig: SwarmRig, pipes: list, sleep_s: float, seconds: float) -> dict:
    """Messages per second, both ways, the time from an answer to the next ticket, and what CPU time the leader took."""
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            if rig.controller.take_batch_if_ready() is None:
                time.sleep(0.01)
            else:
                rig.publish()

    with ThreadPoolExecutor(1) as trainer:
        training = trainer.submit(train)
        tell(pipes, sleep_s)
        time.sleep(seconds / 2 + sleep_s)  # until all machines have that pace
        tell(pipes, sleep_s)
        start, before, version = time.monotonic(), cpu_of_threads(), rig.version
        time.sleep(seconds)
        found, spent = tell(pipes, None), time.monotonic() - start
        after = cpu_of_threads()
        is_over.set()
        training.result()
    cpu = sorted((used - before.get(thread, 0.0)) / spent for thread, used in after.items())
    latencies = np.array([latency for one in found for latency in one["latencies"]])
    p50, p99 = (float(np.quantile(latencies, q)) for q in (0.5, 0.99))
    sums = {f"{name}_per_s": sum(one[name] for one in found) / spent for name in ("messages", "finished")}
    versions = {"versions_per_s": (rig.version - version) / spent, "p50_s": p50, "p99_s": p99}
    return {**sums, **versions, "leader_cpu": sum(cpu), "busiest_thread_cpu": cpu[-1]}


def tell(pipes: list, what: float | None) -> list[dict]:
    """Say something to all processes of sleepers; what they found, if that was None."""
    for pipe in pipes:
        pipe.send(what)
    return [pipe.recv() for pipe in pipes if what is None]


def cpu_of_threads() -> dict[int, float]:
    """Seconds of CPU of each thread of this process so far."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


# delta, refresh


class Learner:
    """A policy that learns, step after step, on the same sequences."""

    def __init__(self, model: str, lr: float):
        self.config = NATURAL.config(model=model, lr=lr, warmup=0)
        path = resolve_model(model, self.config.task)
        (self.updates,) = distribute([make_sequences(self.config, path)], 1, self.config.max_tokens_per_microbatch)
        self.policy = load_policy(self.config, path, torch.device("cpu"))
        for _ in range(PARTS["delta"]["steps"]):
            self.step()

    def step(self) -> Weights:
        """Make a step; the weights after it."""
        self.policy.train_step(self.updates, 0)
        return [(name, weight.clone()) for name, weight in self.policy.named_full_parameters()]


@contextmanager
def pulling(model: str, lr: float, logs: Path) -> Iterator[Measure]:
    """Steps of a policy; what each version is as a delta, and whole, to the puller that has the one before."""
    learner = Learner(model, lr)
    specs = [ParameterSpec(spec.name, torch.bfloat16, spec.shape) for spec in learner.policy.sent_specs()]
    transport, puller, version = PullTransport(specs), Puller(PullTransport(specs).init_info(), lambda pull: None), 0

    def measure() -> dict:
        nonlocal version
        version += 1
        info, base = transport.stage(version, learner.step()).messages[0], puller.here and puller.here.version
        whole = pull(transport, Puller(transport.init_info(), lambda pull: None), info, None)
        delta = pull(transport, puller, info, base)
        return {
            "lr": lr,
            **{f"{name}_{of}": way[of] for name, way in (("whole", whole), ("delta", delta)) for of in way},
        }

    yield measure


def pull(transport: PullTransport, puller: Puller, info: dict, base: int | None) -> dict:
    """Bring a version to a puller; bytes, and seconds at the trainer and at the machine."""
    puller.want(info)
    start = time.perf_counter()
    is_delta, stream = transport.open(info["version"], base)
    opened = time.perf_counter()
    for offset in range(0, len(stream), PIECE_BYTES):
        data = bytes(memoryview(stream)[offset : offset + PIECE_BYTES])
        puller.take(Piece(info["version"], is_delta, len(stream), offset, data))
    if puller.here is None or puller.here.digest != info["digest"]:
        raise RuntimeError(f"version {info['version']} did not arrive")
    return {"bytes": len(stream), "open_s": opened - start, "take_s": time.perf_counter() - opened}


@contextmanager
def refreshing(model: str, logs: Path) -> Iterator[Measure]:
    """A machine behind a slow link, to which weights come that are new in each word, or of a policy's next step."""
    part, learners = PARTS["refresh"], {lr: Learner(model, lr) for lr in PARTS["delta"]["lrs"]}
    config, within = NATURAL.config(model=model), [part["within"]]
    with set_up(part["make"], part["undo"]), swarm(config, logs / "refresh", within, Bf16Rig, part["host"]) as (rig, _):

        def measure() -> dict:
            found = {"all new": rig.refresh([(name, torch.randn(w.shape) / 50) for name, w in rig.weights])}
            for lr, learner in learners.items():
                rig.refresh(learner.step())
                found[f"lr {lr:g}"] = rig.refresh(learner.step())
            return found

        yield measure


# churn, modes


@contextmanager
def job(part: str, seed: int, options: dict, logs: Path) -> Iterator[Measure]:
    """A whole run of train_async.py, with its seed, to its end."""
    options = PARTS[part]["options"] | options | {"seed": seed}
    yield lambda: run_job(logs / f"{part}-{len(list(logs.iterdir()))}", PARTS[part], **options)


def run_job(folder: Path, part: dict, machines: int, **options) -> dict:
    """Run the job; what its records say."""
    folder.mkdir()
    if machines:
        options |= {"num_rollout_workers": 0, "listen": f"127.0.0.1:{free_port()}"}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "train_async.py", f"--runs-dir={folder}", "--run-name=run", *given]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(folder / "output", "w") as output, ExitStack() as on_end:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment)
        on_end.callback(process.kill)
        joined = []
        for index in range(machines):
            while not (folder / "run" / "swarm.key").exists() and process.poll() is None:
                time.sleep(0.1)
            joined.append(Machine(options["listen"], folder / "run" / "swarm.key", folder / f"machine_{index}.log"))
            on_end.callback(joined[-1].end)
        random_events = Churn(joined, options["steps"], part, options["seed"]) if "num_events" in part else None
        while process.poll() is None:
            time.sleep(0.1)
            if random_events and joined:
                random_events.turn(len(read(folder / "run" / "metrics.jsonl", [])))
    if process.returncode:
        raise RuntimeError(f"the job ended with status {process.returncode}: {(folder / 'output').read_text()[-2000:]}")
    return of_run(folder / "run") | ({"events": random_events.events} if random_events else {})


class Churn:
    """What happens to machines, at random steps: each is killed, stopped for a while, told to leave, or joins again."""

    def __init__(self, machines: list[Machine], steps: int, part: dict, seed: int):
        self.machines, self.stop_s, self.random = machines, part["stop_s"], random.Random(seed)
        self.todo = sorted(self.random.sample(range(steps // 20, steps - steps // 20), part["num_events"]))
        self.gone: set[int] = set()
        self.stopped: dict[int, float] = {}  # machine -> when it goes on
        self.events: list[tuple[int, str, int]] = []

    def turn(self, step: int) -> None:
        """Let happen what is due after a step; one machine at least stays up."""
        for index in [index for index, until in self.stopped.items() if time.monotonic() > until]:
            del self.stopped[index]
            self.machines[index].signal(signal.SIGCONT)
        up = [index for index in range(len(self.machines)) if index not in self.gone and index not in self.stopped]
        if not self.todo or step < self.todo[0] or (len(up) < 2 and not self.gone):
            return
        self.todo.pop(0)
        if self.gone and (len(up) < 2 or self.random.random() < 0.5):
            index, what = self.random.choice(sorted(self.gone)), "join"
            self.gone.remove(index)
            self.machines[index].start()
        else:
            index, what = self.random.choice(up), self.random.choice(["SIGKILL", "SIGSTOP", "SIGTERM"])
            self.machines[index].signal(signal.Signals[what])
            if what == "SIGSTOP":
                self.stopped[index] = time.monotonic() + self.stop_s
            else:
                self.gone.add(index)
        self.events.append((step, what, index))


def of_run(path: Path) -> dict:
    """What a run's records say of it. Raises RuntimeError if a token was too old, or the ledger does not balance."""
    metrics, config = load(path).metrics, Config.from_dict(json.loads((path / "run.json").read_text())["config"])
    accuracies = evaluations(metrics)
    for unit, source in (("groups", "issued"), ("tokens", "generated")):
        ends = ("consumed", "resident", *(f"dropped_{reason}" for reason in DROP_REASONS))
        if not (metrics[f"ledger/{unit}_{source}"] == sum(metrics[f"ledger/{unit}_{end}"] for end in ends)).all():
            raise RuntimeError(f"{path}: the ledger of {unit} does not balance")
    if metrics["staleness/max"].max() > config.max_staleness:
        raise RuntimeError(f"{path}: a token is {metrics['staleness/max'].max()} versions old")
    return {
        "accuracy": statistics.fmean(accuracies.iloc[-3:]),
        "accuracies": {int(version): round(value, 4) for version, value in accuracies.items()},
        "rewards": [round(float(reward), 4) for reward in metrics["reward/mean"]],
        "steps_per_s": float(1 / metrics["time/step_s"].median()),
        "seconds": float(metrics["time/step_s"].sum()),
        "staleness_max": int(metrics["staleness/max"].max()),
        "staleness_mean": float(metrics["staleness/mean"].mean()),
        "swarm": {n: float(metrics[n].iloc[-1]) for n in metrics if n.startswith("swarm/") and n.count("/") == 1},
    }


def against_first(found: dict[str, dict]) -> Iterator[dict]:
    """Each run, and how far its accuracy is from the first one's of the same seed and α, and its rewards on average."""
    for arm, of in found.items():
        first = found[next(name for name in found if name[:5] == arm[:5] or "," not in name)]
        apart = [abs(one - other) for one, other in zip(of["rewards"], first["rewards"], strict=True)]
        gaps = {"accuracy_gap": of["accuracy"] - first["accuracy"], "reward_gap": statistics.fmean(apart)}
        yield {"arm": arm, **of, **gaps}


# Cases and tables


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """All parts."""
    yield Case("sockets", [Arm("all", partial(sleeping, PARTS["sockets"]))], by_arm, warm_up=0)
    of_joined = [Arm(who, partial(sampling, "joined", within)) for who, within in JOINED.items()]
    yield Case("joined", of_joined, against_local)
    for part, seed in ((part, seed) for part in ("churn", "modes") for seed in PARTS[part]["seeds"]):
        arms = [Arm(name, partial(job, part, seed, options)) for name, options in PARTS[part]["arms"].items()]
        yield Case(f"{part} {seed}", arms, against_first, warm_up=0, repeats=1)
    for model in ("tiny", *given.models):
        arms = [Arm(f"lr {lr:g}", partial(pulling, model, lr)) for lr in PARTS["delta"]["lrs"]]
        yield Case(f"delta {Path(model).name}", arms)
        yield Case(f"refresh {Path(model).name}", [Arm("all", partial(refreshing, model))], by_arm, warm_up=0)
    yield Case("unequal", [Arm(who, partial(sampling, "unequal", of)) for who, of in UNEQUAL.items()], shares)


JOINED = {"local": None, "joined": ("fast",)}
UNEQUAL = {"slow": ("slow",), "fast": ("fast",), "both": ("slow", "fast")}
"""Arms, and the machines that sample in each; None is a local worker."""


def by_arm(found: dict[str, dict]) -> Iterator[dict]:
    """A record of each thing that the one arm measured."""
    yield from ({"arm": name, **of} for name, of in found["all"].items())


COLUMNS = {
    "sockets": (
        Column("finished_per_s", "responses/s", ".0f"),
        Column("messages_per_s", "messages/s", ".0f"),
        Column("versions_per_s", "versions/s"),
        Column("p50_s", "answer to next ticket, p50, ms", ".1f", 1e3),
        Column("p99_s", "p99, ms", ".1f", 1e3),
        Column("leader_cpu", "leader's CPU, cores"),
        Column("busiest_thread_cpu", "its busiest thread"),
    ),
    "joined": (
        Column("samples_per_s", "samples/s", ".0f"),
        Column("of_local", "of local", ".3f", better=1, target=0.95),
        Column("bytes_received", "bytes from it per sample", ".0f"),
        Column("bytes_sent", "bytes to it per sample", ".0f"),
        Column("trainer_cpu_s", "CPU of the trainer's process per sample, ms", ".2f", 1e3),
        Column("machine_cpu_s", "of the joining process, ms", ".2f", 1e3),
    ),
    "churn": (
        Column("accuracy", "accuracy, last three", ".3f"),
        Column("accuracy_gap", "less the unbroken run's", "+.3f"),
        Column("staleness_max", "oldest token, versions", ".0f"),
        Column("steps_per_s", "steps/s"),
    ),
    "modes": (
        Column("accuracy", "accuracy, last three", ".3f"),
        Column("accuracy_gap", "less local", "+.3f"),
        Column("reward_gap", "rewards apart, mean", ".3f"),
        Column("staleness_mean", "lag, mean"),
        Column("staleness_max", "most", ".0f"),
        Column("steps_per_s", "steps/s"),
    ),
    "delta": (
        Column("whole_bytes", "whole, kB", ".1f", 1e-3),
        Column("delta_bytes", "delta, kB", ".1f", 1e-3),
        Column("whole_take_s", "whole: at the machine, ms", ".2f", 1e3),
        Column("delta_open_s", "delta: at the trainer, ms", ".2f", 1e3),
        Column("delta_take_s", "at the machine, ms", ".2f", 1e3),
    ),
    "refresh": (Column("bytes", "kB sent", ".1f", 1e-3), Column("refresh_s", "to sampling with it, s")),
    "unequal": (
        Column("share", "share of samples", ".3f"),
        Column("share_of_speed", "share of the speeds alone", ".3f"),
        Column("slow_per_s", "slow alone, samples/s", ".1f"),
        Column("fast_per_s", "fast alone, samples/s", ".1f"),
        Column("both_per_s", "both, samples/s", ".1f"),
        Column("of_sum", "of the sum"),
    ),
}  # fmt: skip


def table(records: list[dict], case: str) -> list[str]:
    """Markdown lines of a case; of seeds, all are one."""
    part = case.split()[0]
    of_seeds = "seeds" in PARTS.get(part, {})
    records = [r for r in records if (r["case"].split()[0] == part if of_seeds else r["case"] == case)]
    return harness.table(part if of_seeds else case, harness.rounds(records, "arm"), COLUMNS[part])


def report(records: list[dict]) -> Iterator[str]:
    """Paragraphs of the page."""
    for name in dict.fromkeys(r["case"].split()[0] if r["case"][-1].isdigit() else r["case"] for r in records):
        yield "\n".join(table(records, name))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Models of one's own."""
    parser.add_argument("--models", nargs="*", default=[], help="folders of models, for delta and refresh")


BENCH = Bench(
    "swarm", "Machines that join", cases, report, key=("case", "arm"), shown="arm", add_options=add_options
)  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    with one_rank():
        harness.main(BENCH)
