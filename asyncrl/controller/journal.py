"""Records of rollout: events for events.jsonl, and measurements for the metrics of a step."""

import time
from collections import Counter
from collections.abc import Callable

from asyncrl.controller.workers import Worker
from asyncrl.messages import ActivityReport, Probed, ProbedVersions, WeightsLoaded
from asyncrl.records import Trajectory
from asyncrl.runlog.metrics import Mean, Measured, merge
from asyncrl.runlog.time_ledger import WORKER_STATES, TimeLedger, seconds, unix_ns


class Journal:
    """Writes events at once, and keeps measurements until the next `take_metrics`.

    While a worker starts, the controller's clock measures its time. Later its own clock does, up to its newest report.
    When the clock changes, the later of the two times counts.
    """

    def __init__(self, record_event: Callable[..., None], clock: Callable[[], int] = unix_ns):
        """`record_event(event, **fields)` writes an event. The controller also calls it."""
        self.record_event = record_event
        self._clock = clock
        # of this node's own workers only
        self._ledgers: dict[int, TimeLedger] = {}
        # workers that are up, and have reported on their own clock
        self._reporting: set[int] = set()
        self._starts: Counter[int] = Counter()
        self._measured: list[Measured] = []
        self._probes: ProbedVersions = {}

    # The life of workers

    def record_start(self, worker: int) -> None:
        """Record that a worker's process is started, perhaps again."""
        if worker not in self._ledgers:
            self._ledgers[worker] = TimeLedger(self._clock())
        self.record_event("worker_started", worker=worker, attempt=self._starts[worker])
        self._starts[worker] += 1

    def record_death(self, worker: Worker) -> None:
        """Record that a worker has died. Until now it was in its last state."""
        index = worker.index
        exit_code, tickets = worker.process.exit_code, len(worker.tickets)
        self.record_event("worker_died", worker=index, exit_code=exit_code, tickets=tickets)
        if index in self._ledgers:
            self._reporting.discard(index)
            self._enter(index, "restarting", self._clock())

    def record_activity(self, worker: int, report: ActivityReport | None) -> None:
        """Record a worker's report, if any."""
        if report is None:
            return
        self._reporting.add(worker)
        for time_ns, state, _ in report.changes:
            self._enter(worker, state, time_ns)
        self._enter(worker, self._ledgers[worker].state, report.until)
        if report.changes:
            changes = [(ns / 1e9, state, reason) for ns, state, reason in report.changes]
            self.record_event(
                "worker_state", worker=worker, changes=changes, until=report.until / 1e9
            )

    def _enter(self, worker: int, state: str, now: int) -> None:
        ledger = self._ledgers[worker]
        ledger.enter(state, max(now, ledger.until))

    # Results of workers

    def record_trajectory(self, trajectory: Trajectory) -> None:
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
            record |= {"oldest_version": int(versions.min()), "newest_version": int(versions.max())}
        if trajectory.failure:
            record["failure"] = trajectory.failure
        self.record_event("trajectory", **record)

    def record_loading(self, worker: int, message: WeightsLoaded, made_at: float) -> None:
        """Record that a worker has loaded weights that were announced at `made_at`, monotonic seconds."""
        self.record_activity(worker, message.activity)
        sampled = message.sampled
        self._measured.append(
            {
                "rollout/pause_s": Mean(message.pause_s, 1),
                # APRIL's ratio (arXiv 2509.18521): tokens after the update, of all new tokens
                "rollout/resumed_share": Mean(sampled.resumed, sampled.new),
                "rollout/discarded_tokens": sampled.discarded,
            }
        )
        broadcast_s = time.monotonic() - made_at
        self.record_event(
            "update",
            worker=worker,
            version=message.version,
            pause_s=message.pause_s,
            broadcast_s=broadcast_s,
        )

    def record_probe(self, worker: int, message: Probed) -> None:
        """Record a worker's scores of the probe."""
        self._probes.setdefault(message.version, {})[worker] = message

    def has_probed(self, worker: int, version: int) -> bool:
        """Return whether a worker has scored the probe at a version, since the last `take_probes`."""
        return worker in self._probes.get(version, {})

    # Sums

    def take_metrics(self) -> Measured:
        """Return the measurements since the last call."""
        measured, self._measured = self._measured, []
        spent = self.take_time()
        shares = {
            f"worker_time/{state}": Mean(spent[state], spent.total()) for state in WORKER_STATES
        }
        return merge([{"rollout/discarded_tokens": 0}, shares, *measured])

    def take_time(self) -> Counter[str]:
        """Return the nanoseconds in each state that became known since the last call, summed over workers."""
        spent: Counter[str] = Counter()
        for worker, ledger in self._ledgers.items():
            until = ledger.until if worker in self._reporting else max(self._clock(), ledger.until)
            spent += ledger.take(until).spent
        return spent

    def take_probes(self) -> ProbedVersions:
        """Return the engines' scores of the probe since the last call, by version and worker."""
        probes, self._probes = self._probes, {}
        return probes

    def worker_time(self) -> dict[int, Counter[str]]:
        """Return the nanoseconds of each worker in each of WORKER_STATES so far."""
        return {worker: ledger.total for worker, ledger in self._ledgers.items()}

    def close(self) -> None:
        """Record each worker's time; all have ended."""
        self.take_time()
        for worker, ledger in self._ledgers.items():
            self.record_event(
                "worker_time",
                worker=worker,
                until=ledger.until / 1e9,
                seconds=seconds(ledger.total),
            )
