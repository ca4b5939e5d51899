"""A whole run on a virtual clock: the real Controller, simulated workers, and a trainer that only takes time.

The trainer takes a batch, trains on it and publishes, as train_async.py does. A broadcast of weights stops the trainer
and every engine for its time. Hosts of a swarm fetch weights when they can, and need the time of a broadcast to load
them. Evaluations, checkpoints and failures of processes are not simulated.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.messages import Finished
from asyncrl.records import Group
from asyncrl.weights.transport import Announcement, Staged, Transport
from extras.baselines import BaselineController, BaselineTickets
from extras.simulation.clock import Clock
from extras.simulation.engine import Cluster
from extras.simulation.workers import SimulatedWorkers
from extras.simulation.workload import Workload


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    options: dict
    """Options of Config."""
    workload: Workload
    cluster: Cluster
    steps: int = 8
    """Measured steps."""
    warmup: int = 3
    """Steps before them, while the pipeline fills."""
    seed: int = 0

    @property
    def config(self) -> Config:
        """Return the options of the run. Raises ValueError for options that are not simulated."""
        common = {
            "algo": "tis",
            "task": "guess_number" if self.workload.turns else "addition",
            "async_ratio": 0.0,
            "max_running_requests": self.cluster.curve.max_running_requests,
        }
        config = Config.from_dict({**common, **self.options}).checked()
        if config.on_update in ("restart", "wait") or config.scheduling == "batch":
            raise ValueError("--on-update restart or wait and --scheduling batch are not simulated")
        if not config.replicate_prompts:
            raise ValueError("--no-replicate-prompts is not simulated")
        # failures are drawn by the workload, and must not end a run
        return replace(config, max_failed_share=1.0)


@dataclass(frozen=True)
class Step:
    """Measurements of a step of the trainer, times in seconds of the virtual clock."""

    wait_s: float
    """Wait for the batch, from the arrival of the weights before it. At α = 0 this is the time of rollout."""
    train_s: float
    tokens: int
    """Generated tokens that are trained on."""
    staleness: tuple[int, ...]
    """Staleness of each trajectory, in steps."""


@dataclass
class Outcome:
    """Results of a run over its measured steps."""

    case: Case
    steps: list[Step]
    numbers: dict[str, float]
    """Means over steps, seconds, and shares; `cpu_ms_per_trajectory` is the real controller's CPU time."""
    ledger: dict[str, int]
    """The ledger at the end."""


class _Transport(Transport):
    """Replaces a weight transport. The workers know how long loading takes."""

    def is_kept(self, version: int) -> bool:
        """Return True: every announced version can be fetched."""
        return True

    def staged(self, version: int) -> Staged:
        """Return a version for hosts of a swarm."""
        return Staged(version, [])


class Simulation:
    """One case, run to its end.

    `record_event(event, **fields)` gets the controller's events and a `step` per batch, as in events.jsonl. Their times
    are in seconds of the virtual clock.
    """

    def __init__(self, case: Case, record_event: Callable[..., None] = lambda event, **_: None):
        self._record_event = record_event
        self.case, self.clock = case, Clock()
        # The measured steps are within a run: near its end fewer groups start.
        self.config = replace(case.config, steps=10**9)
        has_swarm = case.cluster.swarm is not None
        kinds = (SimulatedWorkers, BaselineController if self.config.is_baseline else Controller)
        if has_swarm:
            # extras/swarm is optional for all other cases
            from extras.simulation.swarm import SimulatedSwarm

            kinds = SimulatedSwarm.kinds
        self.workers = kinds[0](self.clock, self.config, case.workload, case.cluster)
        tickets = BaselineTickets(self.config, case.workload.prompts(case.seed))
        self.controller = kinds[1](self.config, self.workers, tickets, self._record)
        self.controller.pulled = _Transport()
        self._counts, self._counts_before = Counter(), Counter()
        self.workers.on_handled = self._on_handled
        self.controller.launch()
        self.controller.connect(_Transport())
        self.swarm = SimulatedSwarm(self, case.cluster) if has_swarm else None
        self.steps: list[Step] = []
        self._version = 0
        self._is_waiting = False
        self._published_at = self._started_at = 0.0

    def run(self) -> Outcome:
        """Run all steps. Raises RuntimeError if a bound or the ledger is broken, or if the run is stuck."""
        self._publish()
        self.clock.run_until(lambda: self._is_over and self._is_waiting)
        steps = self.steps[self.case.warmup :]
        return Outcome(self.case, steps, self._numbers(steps), self.controller.buffer.balance())

    @property
    def _is_over(self) -> bool:
        return len(self.steps) == self.case.warmup + self.case.steps

    def _counts_now(self) -> Counter:
        """Return counts, bytes of weights sent, and seconds that slots and the controller were busy."""
        counts = self._counts.copy()
        counts["controller_s"] = self.workers.controller_busy_s
        counts["cpu_s"] = self.workers.cpu_s
        counts["slot_s"] = sum(worker.process.engine.slot_s_now() for worker in self.workers)
        if self.swarm:
            counts.update(slot_s=self.swarm.gone_slot_s, sent_bytes=self.swarm.uplink.sent_bytes)
        return counts

    def _numbers(self, steps: list[Step]) -> dict[str, float]:
        cluster, seconds = self.case.cluster, self._published_at - self._started_at
        counts = self._counts_now() - self._counts_before
        staleness = [lag for step in steps for lag in step.staleness]
        numbers = {
            "step_s": seconds / len(steps),
            "rollout_s": fmean(step.wait_s for step in steps),
            "train_s": fmean(step.train_s for step in steps),
            "trained_tokens_per_s": sum(step.tokens for step in steps) / seconds,
            "slot_share": counts["slot_s"] / (seconds * cluster.num_slots),
            "controller_share": counts["controller_s"] / seconds,
            "cpu_ms_per_trajectory": 1000 * counts["cpu_s"] / counts["ended"],
            "staleness_mean": fmean(staleness),
            "staleness_max": max(staleness),
            "workers": cluster.num_workers,
            "steps": len(steps),
        }
        if self.swarm:
            uplink_bytes = seconds * cluster.swarm.uplink_bytes_per_s
            numbers |= {
                "uplink_share": counts["sent_bytes"] / uplink_bytes,
                "fetch_s": fmean(self.swarm.fetches_s or [0.0]),
                "reissued": counts["reissued"] / len(steps),
            }
        return numbers

    def _record(self, event: str, **fields) -> None:
        if event == "worker_died":
            self._counts["reissued"] += fields["tickets"]
        self._record_event(event, time=self.clock.now, **fields)

    def _publish(self) -> None:
        version = self.config.due_version(self._version)
        with self.workers.timed():
            self.controller.announce_or_defer(
                Announcement(version, self._version, Staged(0, []), (), False)
            )
        self.clock.after(self.case.cluster.sync_s, self._begin_waiting)

    def _begin_waiting(self) -> None:
        self._published_at, self._is_waiting = self.clock.now, True
        if len(self.steps) == self.case.warmup:
            self._started_at, self._counts_before = self.clock.now, self._counts_now()
        self._try_to_take()

    def _on_handled(self, message) -> None:
        if isinstance(message, Finished):
            self._counts["ended"] += len(message.trajectories)
            self._try_to_take()

    def _try_to_take(self) -> None:
        if not self._is_waiting or self._is_over:
            return
        with self.workers.timed():
            groups = self.controller.consume_batch() if self.controller.hold_batch() else []
        if not groups:
            return
        self._is_waiting = False
        step = self._step(groups)
        self.steps.append(step)
        spans = [("train", self.clock.now, self.clock.now + step.train_s)]
        group_ids = [group.group_id for group in groups]
        self._record("step", step=len(self.steps), spans=spans, groups=group_ids)
        self.clock.after(step.train_s, self._end_step)

    def _end_step(self) -> None:
        self._version += 1
        self.controller.buffer.balance()  # raises if it does not balance
        self._publish()

    def _step(self, batch: list[Group]) -> Step:
        trajectories = [t for group in batch for t in group.trajectories]
        tokens = sum(t.num_generated for t in trajectories)
        prompt_tokens = self.case.workload.prompt_tokens * len(trajectories)
        return Step(
            wait_s=self.clock.now - self._published_at,
            train_s=(tokens + prompt_tokens) * self.case.cluster.train_s_per_token,
            tokens=tokens,
            staleness=tuple(self._version - t.oldest_version for t in trajectories),
        )


def simulate(case: Case) -> Outcome:
    """Run a case; see Simulation."""
    return Simulation(case).run()
