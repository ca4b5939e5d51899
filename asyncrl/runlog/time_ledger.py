"""The time ledger: each process is in exactly one state at any time, counted in whole nanoseconds.

So the times of all states sum exactly to the time that passed. TRAINER_STATES and WORKER_STATES define the states.
Only the defaults of `now` and `clock` read the real clock.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from asyncrl.messages import ActivityReport, IdleReason

TRAINER_STATES = {
    "starting": "before the first step: model, engines, first weights",
    "wait": "for a batch of groups that is fresh enough",
    "gather": "the batch becomes each rank's share: advantages, micro-batches, scatter",
    "forward_backward": "log-probs, loss and gradients with their collectives, to their end on the device; statistics",
    "optimizer": "gradient clipping and the optimizer's step, to their end on the device",
    "publish": "the probe is chosen and scored, full parameters are gathered, staged in a free buffer, announced",
    "evaluate": "waiting that an evaluation causes: while it holds newer weights back, and for the last one to end",
    "save": "what the run keeps: checkpoints, and batches with --record",
    "other": "records, and all that has no name",
}
"""States of trainer rank 0, by the time of its host."""
WORKER_STATES = {
    "starting": "until the engine is up",
    "decoding": "at least one request of a trajectory is in the engine",
    "environment": "no request is in the engine; a trajectory is in its environment or being rewarded",
    "starved": "nothing to run, nor a reason to hold it back: a ticket is on its way, or others are waited for",
    "gated": "stands still for freshness: no place in the bound, no weights yet, weights that are still to come, "
    "an evaluation that holds weights back, suspended by over-sampling, or asleep while the trainer computes",
    "paused": "weights are being updated",
    "restarting": "from a death until the next engine is up",
}
"""States of a rollout worker."""
TRAINING = ("gather", "forward_backward", "optimizer")
"""The trainer's states while it computes a step."""
WAITING = ("wait", "evaluate")
"""The trainer's states while it waits."""

_OFFSET_NS = time.time_ns() - time.monotonic_ns()


def unix_ns() -> int:
    """Return Unix time in nanoseconds. It never goes back, even if the system's clock is set."""
    return time.monotonic_ns() + _OFFSET_NS


@dataclass(frozen=True)
class Account:
    """The states between two moments."""

    spans: tuple[tuple[str, int, int], ...]
    """State, start and end, Unix ns. Each span begins at the end of the one before."""

    @property
    def spans_s(self) -> list[tuple[str, float, float]]:
        """The spans in Unix seconds, for the records."""
        return [(state, start / 1e9, end / 1e9) for state, start, end in self.spans]

    @property
    def spent(self) -> Counter[str]:
        """Nanoseconds in each state."""
        spent: Counter[str] = Counter()
        for state, start, end in self.spans:
            spent[state] += end - start
        return spent


class TimeLedger:
    """The states of one process over time, by default on the real clock."""

    def __init__(self, now: int | None = None):
        """Begin in the state "starting" at `now`, Unix ns."""
        self.total: Counter[str] = Counter()
        """Nanoseconds in each state until `until`."""
        self.until = unix_ns() if now is None else now
        self._spans: list[tuple[str, int, int]] = []
        self.state = "starting"

    def enter(self, state: str, now: int | None = None) -> None:
        """Leave the present state and enter `state` at `now`, not before `until`. The same state again continues."""
        now = unix_ns() if now is None else now
        if now > self.until:
            self.total[self.state] += now - self.until
            start = self.until
            if self._spans and self._spans[-1][0] == self.state:
                _, start, _ = self._spans.pop()
            self._spans.append((self.state, start, now))
            self.until = now
        self.state = state

    def take(self, now: int | None = None) -> Account:
        """Return the account since the last one until `now`. The state continues."""
        self.enter(self.state, now)
        spans, self._spans = self._spans, []
        return Account(tuple(spans))


# Rollout workers


class Activity:
    """State of a rollout worker. The worker keeps it.

    A state is noted when it changes, and travels with the next message that is sent anyway.
    """

    def __init__(self, clock: Callable[[], int] = unix_ns):
        self._clock = clock
        self._requests = self._trajectories = 0
        self._pause_reason = self._idle_reason = ""
        self._now = ("starved", "")
        self._changes: list[tuple[int, str, str]] = [(clock(), *self._now)]

    def add(self, requests: int = 0, trajectories: int = 0) -> None:
        """Change the numbers of requests in the engine, and of trajectories that do not wait for other trajectories."""
        self._requests += requests
        self._trajectories += trajectories
        if trajectories > 0:
            self._idle_reason = ""
        self._note()

    def pause(self, reason: str) -> None:
        """Pause all requests: for an `update`, or `suspended` until the next one."""
        self._pause_reason = reason
        self._note()

    def resume(self) -> None:
        """End a pause."""
        self._pause_reason = ""
        self._note()

    def set_idle(self, reason: str) -> None:
        """Note why the worker has no request: an IdleReason of the controller, or another reason."""
        self._idle_reason = reason
        self._note()

    def _note(self) -> None:
        now = self._state()
        if now != self._now:
            self._now = now
            self._changes.append((self._clock(), *now))

    def _state(self) -> tuple[str, str]:
        if self._pause_reason:
            return ("paused" if self._pause_reason == "update" else "gated"), self._pause_reason
        if self._requests:
            return "decoding", ""
        if self._trajectories:
            return "environment", ""
        return (
            "gated" if self._idle_reason in get_args(IdleReason) else "starved"
        ), self._idle_reason

    def report(self) -> ActivityReport:
        """Return all changes since the last report."""
        changes, self._changes = self._changes, []
        return ActivityReport(tuple(changes), self._clock())


# Numbers and text


def seconds(spent: Counter[str]) -> dict[str, float]:
    """Return nanoseconds as seconds."""
    return {state: ns / 1e9 for state, ns in spent.items()}


def describe(name: str, spent: Counter[str]) -> str:
    """Return one line: the total time, and the share of each state, the largest first."""
    parts = [f"{state} {ns / spent.total():.1%}" for state, ns in spent.most_common() if ns]
    return f"{name}  {spent.total() / 1e9:.1f} s: {', '.join(parts)}"
