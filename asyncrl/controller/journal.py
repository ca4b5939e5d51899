"""What is recorded of rollout: events for events.jsonl, and measurements for a step's metrics."""

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from asyncrl.messages import ActivityReport, SampledTokens, Updated
from asyncrl.records import Trajectory
from asyncrl.runlog.metrics import RolloutReport
from asyncrl.runlog.time_ledger import WorkerLedgers, seconds, unix_ns


class Journal:
    """Writes events as they happen and keeps measurements until they are asked for."""

    def __init__(self, record: Callable[..., None]):
        """`record(event, **fields)` writes an event; the controller's own, too, of which nothing is measured."""
        self.record = record
        self._ledgers = WorkerLedgers()
        self._starts: Counter[int] = Counter()
        self._pause_s: list[float] = []
        self._broadcasts_s: list[float] = []
        self._probes: dict[int, dict[int, tuple[np.ndarray, ...]]] = {}  # version -> worker -> log-probs
        self._sampled = SampledTokens()

    # The life of workers

    def started(self, worker: int) -> None:
        """A worker's process is started; again, if the one before it died."""
        if not self._starts[worker]:
            self._ledgers.start(worker, unix_ns())
        self.record("worker_started", worker=worker, attempt=self._starts[worker])
        self._starts[worker] += 1

    def lost(self, worker: int) -> None:
        """A worker is gone; why is yet to be found out."""
        if self._starts[worker]:  # else of a machine that has joined
            self._ledgers.lose(worker, unix_ns())

    def active(self, worker: int, report: ActivityReport | None) -> None:
        """A worker said what it was doing, or had nothing new to say."""
        if report is None:
            return
        self._ledgers.add(worker, report)
        if report.changes:
            changes = [(ns / 1e9, state, reason) for ns, state, reason in report.changes]
            self.record("worker_state", worker=worker, changes=changes, until=report.until / 1e9)

    # What workers return

    def trajectory(self, trajectory: Trajectory) -> None:
        """A trajectory came back."""
        self.record("trajectory", **_summary(trajectory))

    def updated(self, worker: int, message: Updated, made_at: float) -> None:
        """A worker has loaded new weights, which were announced at `made_at`, monotonic seconds."""
        self.active(worker, message.activity)
        self._pause_s.append(message.pause_s)
        self._broadcasts_s.append(time.monotonic() - made_at)
        self._sampled += message.sampled
        self.record("update", worker=worker, version=message.version, pause_s=message.pause_s)

    def probed(self, worker: int, version: int, logprobs: tuple[np.ndarray, ...]) -> None:
        """A worker has scored the probe."""
        self._probes.setdefault(version, {})[worker] = logprobs

    # Sums

    def take_report(self, ledger: dict[str, int], num_restarts: int) -> RolloutReport:
        """What was measured since the last call: pauses, tokens, time of all workers; and what the controller knows."""
        pauses, self._pause_s = self._pause_s, []
        broadcasts, self._broadcasts_s = self._broadcasts_s, []
        sampled, self._sampled = self._sampled, SampledTokens()
        return RolloutReport(pauses, sampled, self._ledgers.take(unix_ns()), Counter(ledger), num_restarts, broadcasts)

    def take_probes(self) -> dict[int, dict[int, tuple[np.ndarray, ...]]]:
        """The engines' log-probs of the probe by version and worker, as far as they have come since the last call."""
        probes, self._probes = self._probes, {}
        return probes

    def worker_time(self) -> dict[int, Counter[str]]:
        """Nanoseconds of each worker in each of WORKER_STATES so far."""
        return {worker: ledger.total for worker, ledger in self._ledgers.items()}

    def close(self) -> None:
        """Record each worker's time; all have ended."""
        self._ledgers.take(unix_ns())
        for worker, ledger in self._ledgers.items():
            self.record("worker_time", worker=worker, until=ledger.until / 1e9, seconds=seconds(ledger.total))


def _summary(trajectory: Trajectory) -> dict:
    record = {
        "ticket": trajectory.ticket_id,
        "group": trajectory.group_id,
        "member": trajectory.member,
        "worker": trajectory.worker,
        "started_at": trajectory.started_at,
        "ended_at": trajectory.ended_at,
        "turns": trajectory.turns,
        "tokens": trajectory.num_generated,
        "finish_reason": trajectory.finish_reason,
        "reward": trajectory.reward,
    }
    if trajectory.num_generated:
        versions = trajectory.policy_versions[trajectory.loss_mask]
        record |= {"min_version": int(versions.min()), "max_version": int(versions.max())}
    return record if not trajectory.failure else record | {"failure": trajectory.failure}
