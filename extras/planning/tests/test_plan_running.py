"""The planner against machines of unequal speed that join a run here: who does how much, and what a step takes.

Real engines and sockets: two machines run `rollout.py --join`, each held to its share of a core by a cgroup, for which
one must be root. The trainer is somewhere else and takes no CPU: it sleeps for the time of its step. Each machine first
samples alone; from these two rates and the time of a broadcast the planner says what both do together. Records:
extras/planning/tests/planner_records.py.
"""

import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from planner_records import keep

from asyncrl.config import Config, SwarmOptions
from asyncrl.job.publisher import connect_workers
from extras.planning import planner
from extras.planning.planner import Cluster, Job, Lengths, Plan, Pool
from extras.planning.shape import read_shape
from rollout import run_worker
from scripts.bench.harness import ROOT
from scripts.bench.rig import Rig, load_weights, running, specs_of
from scripts.lines import read

CGROUPS = Path("/sys/fs/cgroup/cpu")
QUOTAS_US = {"slow": 20_000, "fast": 50_000}
"""Of each 100 ms of one core."""
REPEATS, STEPS = 6, 6
UP_S = 200.0

pytestmark = [
    pytest.mark.e2e, pytest.mark.study, pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0 or not CGROUPS.is_dir(), reason="needs root and cgroups of version 1"),
]  # fmt: skip


class JoinedRig(Rig):
    """A rig for which machines sample."""

    def connect(self) -> None:
        """Let machines in."""
        self.weights = load_weights(self.node.model_path)
        connect_workers(self.node, specs_of(self.weights))

    def publish(self) -> None:
        """Publish the same weights under the next version."""
        factor = 1.0001 if self.version % 2 else 1 / 1.0001  # else there would be nothing to send
        self.weights = [(name, weight * factor) for name, weight in self.weights]
        super().publish()
        self.controller.swarm.take_answered()

    def turn(self, train_s: float) -> None:
        """One step of a trainer that takes so long."""
        self.controller.take_batch()
        time.sleep(train_s)
        self.publish()

    def await_workers(self, count: int) -> None:
        """Wait until so many machines sample."""
        deadline = time.monotonic() + UP_S
        while sum(worker.is_up for worker in list(self.controller.workers)) != count:
            assert time.monotonic() < deadline, self.controller.describe()
            time.sleep(0.1)


@contextmanager
def held(name: str):
    """A cgroup, not yet held to anything; whoever is in it has ended before."""
    group = CGROUPS / f"plan_running_{name}"
    group.mkdir()
    (group / "cpu.shares").write_text("100000")  # its share is its own, whatever else runs here
    try:
        yield group
    finally:
        deadline = time.monotonic() + 20.0
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        group.rmdir()


@contextmanager
def machine(name: str, core: int, address: str, folder: Path):
    """A machine on one core that joins; `hold()` holds it to its share."""
    with held(name) as group, open(folder / f"{name}.log", "w") as log, ExitStack() as on_end:
        command = [
            sys.executable,
            "rollout.py",
            "--join",
            address,
            "--key",
            str(folder / "rig" / "swarm.key"),
        ]
        into = f'echo $$ > {group}/cgroup.procs && exec taskset -c {core} "$@"'
        process = subprocess.Popen(
            ["sh", "-c", into, "sh", *command], cwd=ROOT, stdout=log, stderr=log
        )
        on_end.callback(process.wait, 60)
        on_end.callback(process.send_signal, signal.SIGTERM)
        on_end.callback((group / "cpu.cfs_quota_us").write_text, "-1")
        yield lambda: (group / "cpu.cfs_quota_us").write_text(str(QUOTAS_US[name]))


def measured(rig: JoinedRig, train_s: float) -> list[dict]:
    """Of each repeat: seconds of a step and of an update, tokens/s, and the share of the machine that joined first."""
    found = []
    for _ in range(3):
        rig.turn(train_s)  # batches that were ready before
    for _ in range(REPEATS):
        first, start, since = rig.version, time.monotonic(), time.time()
        for _ in range(STEPS):
            rig.turn(train_s)
        seconds = time.monotonic() - start
        events = read(rig.node.run.path / "events.jsonl")
        done = [
            e for e in events if e["event"] == "trajectory" and since < e["time"] < since + seconds
        ]
        of_first = sum(e["tokens"] for e in done if e["worker"] == 0) / sum(
            e["tokens"] for e in done
        )
        update_s = statistics.median(rig.update_seconds(first))
        rate = sum(e["tokens"] for e in done) / (seconds - STEPS * update_s)  # between updates
        found.append(
            {
                "step_s": seconds / STEPS,
                "share": of_first,
                "update_s": update_s,
                "tokens_per_s": rate,
            }
        )
    return found


def median(found: list[dict], name: str) -> float:
    return statistics.median(one[name] for one in found)


def planned(job: Job, rates: dict[str, float], update_s: float, train_s: float) -> Plan:
    """The plan for a trainer that takes `train_s` and machines with these rates."""
    sheet = {
        "price_per_hour": 0.0,
        "tflops": 1.0,
        "hbm_gb_per_s": 100.0,
        "memory_gib": 16.0,
        "gb_per_s": 10.0,
    }
    pools = [
        Pool(name, name, 1, 1, **sheet, sampled_tokens_per_s=rate) for name, rate in rates.items()
    ]
    rate = job.tokens / max(train_s, 1e-3)
    pools.append(
        Pool(
            "trains", "trains", 1, 1, **sheet, trained_tokens_per_s=rate, sampled_tokens_per_s=1e-3
        )
    )
    link = 2 * job.shape.num_parameters / update_s / 1e9
    plans = planner.plan(job, Cluster(tuple(pools), link, link, update_factor=1.0), num=10)
    # none idle
    return next(
        planner.solve(p.split)
        for p in plans
        if p.split.training.pool.name == "trains" and not p.split.colocate
    )


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def measure_all(
    config: Config, folder: Path
) -> tuple[dict[str, list[dict]], dict[float, list[dict]], Job]:
    """What each machine did alone, both together for each time of training, and the job that it was."""
    alone, together = {}, {}
    with running(JoinedRig(config, run_worker, folder / "rig")) as rig, ExitStack() as until_end:
        with machine("slow", 0, config.listen, folder) as hold:
            rig.await_workers(1)
            rig.publish()
            hold()
            alone["slow"] = measured(rig, 0.0)
            hold = until_end.enter_context(machine("fast", 1, config.listen, folder))
            rig.await_workers(2)
            hold()
            together[0.0] = measured(rig, 0.0)
            for times in (0.7, 1.5):
                train_s = times * median(together[0.0], "step_s")
                together[train_s] = measured(rig, train_s)
        rig.await_workers(1)
        alone["fast"] = measured(rig, 0.0)
        events = [e for e in read(rig.node.run.path / "events.jsonl") if e["event"] == "trajectory"]
        lengths = Lengths.of(config.max_prompt_tokens / 2, [e["tokens"] for e in events], 16 * 8)
        return alone, together, Job(config, read_shape(rig.node.model_path), lengths)


def test_machines_of_unequal_speed_share_the_work_and_take_as_long_as_planned(tmp_path):
    options = {
        "groups_per_step": 16,
        "group_size": 8,
        "async_ratio": 1.0,
        "max_running_requests": 8,
    }
    config = Config(
        listen=free_address(), num_rollout_workers=0, swarm=SwarmOptions(verify_share=0), **options
    ).checked()
    alone, together, job = measure_all(config, tmp_path)
    rates = {name: median(found, "tokens_per_s") for name, found in alone.items()}
    update_s = statistics.fmean(median(found, "update_s") for found in alone.values())
    rows = []
    for train_s, found in together.items():
        plan = planned(job, rates, update_s, train_s)
        share = (
            sum(e.rate * count for _, e, count in plan.engines if e.pool.name == "slow") / plan.rate
        )
        said = {
            "arm": f"{train_s:.2f} s of training",
            "predicted_share": share,
            "predicted_s": plan.step_s,
        }
        rows += [{"case": "running", "repeat": i, **said, **one} for i, one in enumerate(found)]
    rows += [{"case": "alone", "arm": name, "repeat": i, **one}
             for name, found in alone.items() for i, one in enumerate(found)]  # fmt: skip
    print(*rows, sep="\n")
    keep(__file__, rows)
    for row in (row for row in rows if row["case"] == "running"):
        # wide: others may compute here meanwhile
        assert abs(row["share"] - row["predicted_share"]) < 0.2, row
        assert 0.6 < row["predicted_s"] / row["step_s"] < 1.5, row
