"""A whole run on a virtual clock: the real Controller, simulated workers, and a trainer that takes its time.

The trainer's turn is that of train_async.py: take a batch, train on it, publish. A broadcast of weights occupies the
trainer and every engine at the same time; to hosts of a swarm weights come as they can, and a load takes as long as
the trainer's staging. Nothing else of a run is there: no evaluation, no checkpoint, no failure of a process.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean

from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.messages import Finished
from asyncrl.records import Group
from asyncrl.weights.transport import Announcement, Staged, Transport
from extras.baselines import BaselineController, BaselineTickets
from extras.simulation.clock import Clock
from extras.simulation.engine import FLOPS_EFFICIENCY, GPUS, MODELS, Cluster
from extras.simulation.fleet import SimulatedWorkers
from extras.simulation.workload import Workload

FLOPS_PER_PARAMETER = 8
"""Of training on a token: 6 for forward and backward, 2 for the log-probs before the update."""


def train_s_per_token(model: str, gpu: str, num_gpus: int) -> float:
    """Seconds of training for each token on that many GPUs, perfectly divided."""
    return (
        FLOPS_PER_PARAMETER
        * MODELS[model].num_parameters
        / (GPUS[gpu].flops * FLOPS_EFFICIENCY * num_gpus)
    )


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    options: dict
    """Options of Config."""
    workload: Workload
    cluster: Cluster
    steps: int = 8
    """Steps that are measured."""
    warmup: int = 3
    """Steps before them, in which the pipeline fills."""
    seed: int = 0

    @property
    def config(self) -> Config:
        """Options of the run. Raises ValueError for what is not simulated."""
        task = "guess_number" if self.workload.turns else "addition"
        slots = self.cluster.curve.max_running_requests * self.cluster.num_replicas
        common = {"algo": "tis", "task": task, "async_ratio": 0.0, "max_running_requests": slots}
        config = Config.from_dict({**common, **self.options}).checked()
        if config.on_update in ("restart", "wait"):
            raise ValueError(
                f"on_update {config.on_update} is not simulated; use keep, recompute or resume"
            )
        return config


@dataclass(frozen=True)
class Step:
    """What happened in one step of the trainer; times in seconds of the virtual clock."""

    wait_s: float
    """For the batch, since the weights before it had arrived everywhere; at α = 0 the time of rollout."""
    train_s: float
    tokens: int
    """Generated tokens that are trained on."""
    inherited_tokens: int
    """Of these, sampled under older weights than the newest published."""
    staleness: tuple[int, ...]
    """Of each trajectory, in steps."""
    slot_s: tuple[float, ...]
    """Seconds that each trajectory held a slot of its engine."""


@dataclass
class Outcome:
    """What a run gave, over its measured steps."""

    case: Case
    steps: list[Step]
    seconds: float
    slot_share: float
    """Share of all slots' time in which they were taken."""
    controller_share: float
    """Share of the time in which the controller was busy."""
    counts: Counter
    """Trajectories `ended`, tokens `generated` for them, and of these those `resumed` after an update."""
    ledger: dict[str, int]
    """At the end of the run."""
    of_swarm: dict[str, float]
    """What there is to say of hosts that come and go; empty if there are none."""

    @property
    def numbers(self) -> dict[str, float]:
        """Every number of the run that a comparison may need, by name; times are means over steps, in seconds."""
        rollout_s = fmean(step.wait_s for step in self.steps)
        tokens = sum(step.tokens for step in self.steps)
        return {
            "step_s": self.seconds / len(self.steps),
            "rollout_s": rollout_s,  # for which the trainer waited for a batch
            "train_s": fmean(step.train_s for step in self.steps),
            "trained_tokens_per_s": tokens / self.seconds,
            # What APRIL (arXiv 2509.18521) measures: all tokens generated, by the time in which rollout ran.
            "new_tokens_per_rollout_s": self.counts["generated"]
            / (rollout_s * len(self.steps) or float("inf")),
            "resumed_share": self.counts["resumed"] / self.counts["generated"],
            "inherited_share": sum(step.inherited_tokens for step in self.steps) / tokens,
            "slot_share": self.slot_share,
            "controller_share": self.controller_share,
            "staleness_max": max(max(step.staleness) for step in self.steps),
            "workers": self.case.cluster.num_workers,
            "steps": len(self.steps),
            **self.of_swarm,
        }


class _Transport(Transport):
    """Stands where a weight transport does; the workers know how long loading takes."""

    def is_kept(self, version: int) -> bool:
        """Every version, as soon as it is announced."""
        return True

    def staged(self, version: int) -> Staged:
        """A version, as hosts of a swarm fetch it."""
        return Staged(version, [])


class Simulation:
    """One case, run to its end."""

    def __init__(self, case: Case):
        self.case, self.clock = case, Clock()
        # failures are the workload's law, and end no simulated run
        self.config = replace(case.config, max_failed_share=1.0)
        has_swarm = case.cluster.swarm is not None
        kinds = (SimulatedWorkers, BaselineController if self.config.is_baseline else Controller)
        if has_swarm:
            # which needs extras/swarm/; all else does without
            from extras.simulation.swarm import SimulatedSwarm

            kinds = SimulatedSwarm.kinds
        self.workers = kinds[0](self.clock, self.config, case.workload, case.cluster)
        tickets = BaselineTickets(self.config, case.workload.prompts(case.seed))
        self.controller = kinds[1](self.config, self.workers, tickets, self._record)
        self.controller.pulled = _Transport()
        self.counts, self._before = Counter(), Counter()
        self.workers.on_handled = self._on_handled
        self.controller.launch()
        self.controller.connect(_Transport())
        self.swarm = SimulatedSwarm(self, case.cluster) if has_swarm else None
        self.steps: list[Step] = []
        self._version = 0
        self._is_waiting = False
        self._published_at = self._started_at = 0.0

    def run(self) -> Outcome:
        """Run all steps. Raises RuntimeError if a bound or the ledger is broken, or if nothing moves any more."""
        self._publish()
        self.clock.run_until(lambda: self._is_over and self._is_waiting)
        seconds = self._published_at - self._started_at
        counts = self._so_far() - self._before
        return Outcome(
            case=self.case,
            steps=self.steps[self.case.warmup :],
            seconds=seconds,
            slot_share=counts["slot_s"] / (seconds * self.case.cluster.num_slots),
            controller_share=counts["controller_s"] / seconds,
            counts=counts,
            ledger=self.controller.buffer.balance(),
            of_swarm=self._of_swarm(counts, seconds) if self.swarm else {},
        )

    @property
    def _is_over(self) -> bool:
        return len(self.steps) == self.case.warmup + self.case.steps

    def _so_far(self) -> Counter:
        """Counts, bytes of weights sent, and seconds in which slots, and in which the controller, were busy."""
        so_far = self.counts.copy()
        so_far["controller_s"] = self.workers.controller_busy_s
        so_far["cpu_s"] = self.workers.cpu_s
        so_far["slot_s"] = sum(worker.process.engine.slot_s_now() for worker in self.workers)
        if self.swarm:
            so_far.update(slot_s=self.swarm.gone_slot_s, sent_bytes=self.swarm.uplink.sent_bytes)
        return so_far

    def _of_swarm(self, counts: Counter, seconds: float) -> dict[str, float]:
        """What was measured of hosts, and the seconds of a step by rates alone and by ECHO-2's rule."""
        cluster, steps = self.case.cluster, self.steps[self.case.warmup :]
        refresh_lag = max(1, self.config.swarm.refresh_lag)
        stale = [lag for step in steps for lag in step.staleness]
        train_s = fmean(step.train_s for step in steps)
        fetch_s, responses = fmean(self.swarm.fetches_s or [0.0]), len(stale) // len(steps)
        rate = counts["ended"] / counts["slot_s"] * cluster.num_slots  # with all slots taken
        # in which the responses of these steps must come
        refresh_s = refresh_lag * train_s - fetch_s
        enough = refresh_lag * responses / refresh_s if refresh_s > 0 else math.inf
        return {
            "staleness_mean": fmean(stale),
            "uplink_share": counts["sent_bytes"] / (seconds * cluster.swarm.uplink_bytes_per_s),
            "fetch_s": fetch_s,
            "cpu_ms_per_trajectory": 1000 * counts["cpu_s"] / counts["ended"],
            "issued_again": counts["issued_again"] / len(steps),
            "tokens_per_response": sum(step.tokens for step in steps) / len(stale),
            "longest_s": fmean(max(step.slot_s) for step in steps),
            "responses_per_s": rate,
            "step_by_rates_s": max(train_s, responses / rate),
            "step_by_echo_s": max(train_s, responses / rate + fetch_s / refresh_lag),
            "machines_by_echo": cluster.num_workers * enough / rate,
        }

    def _record(self, event: str, **fields) -> None:
        if event == "worker_died":
            self.counts["issued_again"] += fields["tickets"]

    def _publish(self) -> None:
        version = max(0, self._version - self.config.publish_delay)
        with self.workers.timed():
            self.controller.publish(Announcement(version, self._version, Staged(0, []), (), False))
        self.clock.after(self.case.cluster.sync_s, self._begin_waiting)

    def _begin_waiting(self) -> None:
        self._published_at, self._is_waiting = self.clock.now, True
        if len(self.steps) == self.case.warmup:
            self._started_at, self._before = self.clock.now, self._so_far()
        self._try_to_take()

    def _on_handled(self, message) -> None:
        if isinstance(message, Finished):
            for t in message.trajectories:
                self.counts.update(
                    ended=1, generated=t.num_generated, resumed=sum(t.segment_tokens[1:])
                )
            self._try_to_take()

    def _try_to_take(self) -> None:
        if not self._is_waiting or self._is_over:
            return
        with self.workers.timed():
            batch = self.controller.find_batch()
            groups = [] if batch is None else self.controller.consume(batch)
        if batch is None:
            return
        self._is_waiting = False
        step = self._step(groups)
        self.steps.append(step)
        self.clock.after(step.train_s, self._end_step)

    def _end_step(self) -> None:
        self._version += 1
        self.controller.buffer.balance()  # raises if it does not balance
        self._publish()

    def _step(self, batch: list[Group]) -> Step:
        trajectories = [t for group in batch for t in group.trajectories]
        tokens = sum(t.num_generated for t in trajectories)
        prompts = self.case.workload.prompt_tokens * len(trajectories)
        newest = max(0, self._version - self.config.publish_delay)
        segments = (
            pair
            for t in trajectories
            for pair in zip(t.policy_versions, t.segment_tokens, strict=True)
        )
        return Step(
            wait_s=self.clock.now - self._published_at,
            train_s=(tokens + prompts) * self.case.cluster.train_s_per_token,
            tokens=tokens,
            inherited_tokens=sum(tokens for version, tokens in segments if version < newest),
            staleness=tuple(self._version - t.oldest_version for t in trajectories),
            slot_s=tuple(t.slot_s for t in trajectories),
        )


def simulate(case: Case) -> Outcome:
    """Run a case; see Simulation."""
    return Simulation(case).run()
