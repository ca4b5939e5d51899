"""A whole run on a virtual clock: the real Controller, simulated workers, and a trainer that takes its time.

The trainer's turn is that of train_async.py: take a batch, train on it, publish. A broadcast of weights occupies the
trainer and every engine at the same time. Nothing else of a run is there: no evaluation, no checkpoint, no failure of a
process.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from config import Config
from controller.controller import Controller
from controller.tickets import TicketSource
from data.messages import Finished
from data.records import Group
from scripts.simulation.clock import Clock
from scripts.simulation.engine import FLOPS_EFFICIENCY, EngineCurve, Gpu, Model
from scripts.simulation.fleet import SimulatedTrajectory, SimulatedWorkers
from scripts.simulation.workload import Workload
from weights.transport import Announcement, Staged

FLOPS_PER_PARAMETER = 8
"""Of training on a token: 6 for forward and backward, 2 for the log-probs before the update."""


@dataclass(frozen=True)
class Cluster:
    """The machines of a case."""

    curve: EngineCurve
    num_workers: int
    train_s_per_token: float
    """Of the trainer as a whole, prompt tokens included; 0 for rollout alone."""
    sync_s: float = 0.0
    """To bring new weights from the trainer to all engines."""
    num_replicas: int = 1
    """Engines that one worker holds, as a data-parallel engine does."""
    message_s: float = 0.0
    """What the controller takes for one finished trajectory."""

    @property
    def num_slots(self) -> int:
        """Responses that are sampled at the same time at most (K of ROLL Flash)."""
        return self.num_workers * self.num_replicas * self.curve.max_running_requests


def train_s_per_token(model: Model, gpu: Gpu, num_gpus: int) -> float:
    """Seconds of training for each token on that many GPUs, perfectly divided."""
    return FLOPS_PER_PARAMETER * model.num_parameters / (gpu.flops * FLOPS_EFFICIENCY * num_gpus)


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    name: str
    options: dict
    """Options of Config in which it differs from COMMON."""
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
        config = Config(**{"task": task, "max_running_requests": slots, **COMMON, **self.options}).checked()
        if config.on_update in ("restart", "wait"):
            raise ValueError(f"on_update {config.on_update} is not simulated; use keep, recompute or resume")
        return config


COMMON = {"algo": "tis", "async_ratio": 0.0}


@dataclass(frozen=True)
class Step:
    """What happened in one step of the trainer; times in seconds of the virtual clock."""

    published_at: float
    """When the weights before it had arrived everywhere, and the trainer began to wait for the batch."""
    taken_at: float
    train_s: float
    tokens: int
    """Generated tokens that are trained on."""
    inherited_tokens: int
    """Of these, sampled under older weights than the newest published."""
    staleness: tuple[int, ...]
    """Of each trajectory, in steps."""
    slot_s: tuple[float, ...]
    """Seconds that each trajectory held a slot of its engine."""

    @property
    def wait_s(self) -> float:
        """For the batch; at α = 0 the time of rollout."""
        return self.taken_at - self.published_at


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
    generated_tokens: int
    resumed_tokens: int
    """Of these, those that continued a response which an update had interrupted."""
    num_trajectories: int
    ledger: dict[str, int]
    """At the end of the run."""

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.steps)

    @property
    def rollout_s(self) -> float:
        """Mean time for which the trainer waited for a batch."""
        return sum(step.wait_s for step in self.steps) / len(self.steps)

    @property
    def train_s(self) -> float:
        return sum(step.train_s for step in self.steps) / len(self.steps)

    @property
    def tokens(self) -> int:
        """Generated tokens that were trained on."""
        return sum(step.tokens for step in self.steps)

    @property
    def trained_tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def new_tokens_per_rollout_s(self) -> float:
        """What APRIL (arXiv 2509.18521) measures: all tokens generated, by the time in which rollout ran."""
        return self.generated_tokens / (self.rollout_s * len(self.steps))

    @property
    def staleness_mean(self) -> float:
        values = [value for step in self.steps for value in step.staleness]
        return sum(values) / len(values)

    @property
    def staleness_max(self) -> int:
        return max(max(step.staleness) for step in self.steps)


class _Transport:
    """Stands where a weight transport does; the workers know how long loading takes."""

    def init_info(self, worker: int) -> dict:
        return {}

    def announce(self, staged: Staged) -> None: ...

    def acquire(self, staged: Staged) -> None: ...

    def release(self, staged: Staged) -> None: ...

    def check(self) -> None: ...


@dataclass
class _Totals:
    """Counts since the beginning of the run."""

    generated: int = 0
    resumed: int = 0
    trajectories: int = 0

    def add(self, trajectory: SimulatedTrajectory) -> None:
        self.generated += trajectory.num_generated
        self.resumed += sum(trajectory.segment_tokens[1:])
        self.trajectories += 1


class Simulation:
    """One case, run to its end."""

    def __init__(self, case: Case, record: Callable[..., None] = lambda event, **fields: None):
        """`record` gets the controller's events, as in a real run."""
        self.case, self.clock, self.config = case, Clock(), case.config
        cluster = case.cluster
        self.workers = SimulatedWorkers(
            self.clock,
            self.config,
            case.workload,
            cluster.curve,
            cluster.num_workers,
            cluster.num_replicas,
            cluster.sync_s,
            cluster.message_s,
        )
        self.controller = Controller(
            self.config, self.workers, TicketSource(self.config, case.workload.prompts(case.seed)), record
        )
        self.workers.on_handled = self._on_handled
        self.controller.launch()
        self.controller.connect(_Transport())
        self.steps: list[Step] = []
        self.totals, self._at_start = _Totals(), _Totals()
        self._version = 0
        self._is_waiting = False
        self._published_at = self._started_at = 0.0
        self._busy_at_start = (0.0, 0.0)

    def run(self) -> Outcome:
        """Run all steps. Raises RuntimeError if a bound or the ledger is broken, or if nothing moves any more."""
        self._publish()
        self.clock.run_until(lambda: len(self.steps) == self.case.warmup + self.case.steps and self._is_waiting)
        seconds = self._published_at - self._started_at
        slot_s, busy_s = (end - start for end, start in zip(self._busy(), self._busy_at_start, strict=True))
        first, last = self._at_start, self.totals
        return Outcome(
            case=self.case,
            steps=self.steps[self.case.warmup :],
            seconds=seconds,
            slot_share=slot_s / (seconds * self.case.cluster.num_slots),
            controller_share=busy_s / seconds,
            generated_tokens=last.generated - first.generated,
            resumed_tokens=last.resumed - first.resumed,
            num_trajectories=last.trajectories - first.trajectories,
            ledger=dict(self.controller.take_report().ledger),
        )

    def _busy(self) -> tuple[float, float]:
        """Seconds in which slots, and in which the controller, have been busy."""
        return sum(engine.slot_s_now() for engine in self.workers.engines), self.workers.controller_busy_s

    def _publish(self) -> None:
        version = max(0, self._version - self.config.publish_delay)
        self.controller.publish(Announcement(version, self._version, Staged(0, []), (), False))
        self.clock.after(self.case.cluster.sync_s, self._begin_waiting)

    def _begin_waiting(self) -> None:
        self._published_at, self._is_waiting = self.clock.now, True
        if len(self.steps) == self.case.warmup:
            self._started_at, self._busy_at_start = self.clock.now, self._busy()
            self._at_start = replace(self.totals)
        self._try_to_take()

    def _on_handled(self, message) -> None:
        if isinstance(message, Finished):
            for trajectory in message.trajectories:
                self.totals.add(trajectory)
            self._try_to_take()

    def _try_to_take(self) -> None:
        if not self._is_waiting or len(self.steps) == self.case.warmup + self.case.steps:
            return
        batch = self._take()
        if batch is None:
            return
        self._is_waiting = False
        step = self._step(batch)
        self.steps.append(step)
        self.clock.after(step.train_s, self._end_step)

    def _take(self) -> list[Group] | None:
        return self.controller.take_batch_if_ready()

    def _end_step(self) -> None:
        self._version += 1
        self.controller.take_report()  # checks the ledger
        self._publish()

    def _step(self, batch: list[Group]) -> Step:
        trajectories = [t for group in batch for t in group.trajectories]
        tokens = sum(t.num_generated for t in trajectories)
        prompts = self.case.workload.prompt_tokens * len(trajectories)
        newest = max(0, self._version - self.config.publish_delay)
        return Step(
            published_at=self._published_at,
            taken_at=self.clock.now,
            train_s=(tokens + prompts) * self.case.cluster.train_s_per_token,
            tokens=tokens,
            inherited_tokens=sum(_tokens_before(t, newest) for t in trajectories),
            staleness=tuple(self._version - t.min_version for t in trajectories),
            slot_s=tuple(t.slot_s for t in trajectories),
        )


def _tokens_before(trajectory: SimulatedTrajectory, version: int) -> int:
    pairs = zip(trajectory.policy_versions, trajectory.segment_tokens, strict=True)
    return sum(tokens for sampled, tokens in pairs if sampled < version)


def simulate(case: Case) -> Outcome:
    """Run a case; see Simulation."""
    return Simulation(case).run()
