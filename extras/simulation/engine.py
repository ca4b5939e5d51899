"""A simulated inference engine, and the speeds of real ones by the formulas of the planner.

Requests that run at the same time decode at the same rate (continuous batching). So one number gives the progress of
all requests: the tokens that each has decoded since the engine started. A prefill stops decoding for its time.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from extras.planning.planner import Job, Pool, largest_engine, make_engine, prefill_s
from extras.simulation.clock import Alarm, Clock

CURVE_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of requests. At these a curve has the planner's speed."""


@dataclass(frozen=True)
class EngineCurve:
    """Speed of one engine."""

    decode: tuple[tuple[float, float], ...]
    """(running requests, tokens/s per request), in rising order of requests."""
    prefill_tokens_per_s: float
    max_running_requests: int
    """Most requests that run at the same time. Further requests wait in the engine."""

    @functools.cache  # noqa: B019  curves live for the whole process
    def rate(self, num_requests: float) -> float:
        """Return tokens/s per request. Its inverse is linear between points, and constant beyond them."""
        requests, rates = zip(*self.decode, strict=True)
        return float(1 / np.interp(num_requests, requests, 1 / np.array(rates)))

    def scaled(self, speed: float = 1.0, replicas: int = 1) -> "EngineCurve":
        """Return the curve of an engine of this relative speed, or of several engines that share their load evenly."""
        decode = tuple((replicas * requests, speed * rate) for requests, rate in self.decode)
        prefill = speed * replicas * self.prefill_tokens_per_s
        return EngineCurve(decode, prefill, replicas * self.max_running_requests)


def roofline(job: Job, pool: Pool) -> EngineCurve:
    """Return the curve of an engine on one GPU of the pool (extras/planning/planner.py)."""
    steps_s = [float(make_engine(job, pool, 1, n).decode_s) for n in CURVE_REQUESTS]
    decode = tuple((n, 1 / step_s) for n, step_s in zip(CURVE_REQUESTS, steps_s, strict=True))
    prefill_tokens_per_s = job.lengths.prompt / prefill_s(job, pool, 1)
    return EngineCurve(decode, prefill_tokens_per_s, int(largest_engine(job, pool, 1).requests))


@dataclass(frozen=True)
class Swarm:
    """Numbers of remote hosts that join and leave; see extras/simulation/swarm.py."""

    weight_bytes: float
    delta_share: float
    """Share of the weights that one step changes; 1 for whole copies."""
    uplink_bytes_per_s: float
    """The trainer's uplink, shared by all hosts that pull. Infinite if they pull from a file system."""
    stay_s: float
    """Mean time that a host stays."""


@dataclass(frozen=True)
class Cluster:
    """Hardware of a case."""

    curve: EngineCurve
    """Engine of each worker."""
    num_workers: int
    train_s_per_token: float
    """The whole trainer's time for a token, prompts included; 0 without training."""
    sync_s: float = 0.0
    """Time to bring new weights from the trainer to all engines."""
    message_s: float = 0.0
    """Time of the controller for one finished trajectory."""
    swarm: Swarm | None = None
    """None if the workers stay. Otherwise num_workers is their mean number."""

    @property
    def num_slots(self) -> int:
        """Most responses that are sampled at the same time (K of ROLL Flash)."""
        return self.num_workers * self.curve.max_running_requests


@dataclass(slots=True, eq=False)
class Request:
    """A response, or one turn of it, in an engine."""

    num_tokens: int
    prefill_tokens: int
    on_done: Callable[["Request"], None]
    start: float = math.inf
    """Progress of the engine, tokens, when the request starts; infinite until then."""
    end: float = math.inf
    """Progress of the engine, tokens, when the request is done."""


class SimulatedEngine:
    """An engine with the speed of a curve."""

    def __init__(self, clock: Clock, curve: EngineCurve):
        self.clock, self.curve = clock, curve
        self._alarm = Alarm(clock, self._end_requests)
        self._slot_s = 0.0
        self._loads: list[tuple[int, float]] = []  # (policy version, progress when it was loaded)
        self._running: dict[Request, None] = {}  # a set that keeps its order
        self._waiting: dict[Request, None] = {}
        self._progress = 0.0  # tokens that every running request has decoded since the beginning
        self._stalled_s = 0.0  # prefill that is due before anything decodes
        self._updated_at = 0.0
        self._is_frozen = False

    def slot_s_now(self) -> float:
        """Return the seconds that slots were taken until now, summed over slots."""
        self._advance()
        return self._slot_s

    def add(self, request: Request) -> None:
        """Start a request, or queue it until a slot is free."""
        self._advance()
        self._waiting[request] = None
        self._start_waiting()

    def remove(self, request: Request) -> int:
        """Abort a request. Returns its number of decoded tokens."""
        self._advance()
        self._waiting.pop(request, None)
        if request not in self._running:
            return 0
        del self._running[request]
        self._start_waiting()
        return int(self._progress - request.start)

    def stop(self) -> None:
        """Drop all requests for good."""
        self.freeze()
        self._running.clear()

    def freeze(self) -> None:
        """Pause until `resume`."""
        self._advance()
        self._is_frozen = True
        self._alarm.set(math.inf)

    def resume(self, version: int, recompute: bool) -> None:
        """Continue under `version`. With `recompute` all running requests are prefilled again first."""
        self._advance()
        self._is_frozen = False
        self._loads.append((version, self._progress))
        if recompute:
            tokens = sum(r.prefill_tokens + self._progress - r.start for r in self._running)
            self._stalled_s += tokens / self.curve.prefill_tokens_per_s
        self._start_waiting()

    def parts_between_updates(self, request: Request, num_tokens: int) -> list[tuple[int, int]]:
        """Return (version, tokens) of each part of a request's decoded tokens, in order, without empty parts."""
        parts, end = [], num_tokens
        for version, loaded_at in reversed(self._loads):
            start = min(end, max(0, round(loaded_at - request.start)))
            if end > start:
                parts.append((version, end - start))
            end = start
            if loaded_at <= request.start:
                break
        return parts[::-1]

    @property
    def _rate(self) -> float:
        return self.curve.rate(len(self._running))

    def _advance(self) -> None:
        """Bring progress up to now."""
        passed_s = self.clock.now - self._updated_at
        self._updated_at = self.clock.now
        self._slot_s += passed_s * len(self._running)
        if self._is_frozen or not self._running:
            return
        stalled_s = min(passed_s, self._stalled_s)
        self._stalled_s -= stalled_s
        self._progress += (passed_s - stalled_s) * self._rate

    def _start_waiting(self) -> None:
        """Give free slots to waiting requests, and set the alarm for the next end."""
        if self._is_frozen:
            return
        while self._waiting and len(self._running) < self.curve.max_running_requests:
            request = next(iter(self._waiting))
            del self._waiting[request]
            request.start = self._progress
            request.end = self._progress + request.num_tokens
            self._running[request] = None
            self._stalled_s += request.prefill_tokens / self.curve.prefill_tokens_per_s
        end = min((request.end for request in self._running), default=math.inf)
        self._alarm.set(self._stalled_s + max(0.0, end - self._progress) / self._rate)

    def _end_requests(self) -> None:
        """End the requests that have all their tokens."""
        self._advance()
        # rounding may have left a little
        self._progress = max(self._progress, min(request.end for request in self._running))
        self._stalled_s = 0.0
        ended = [request for request in self._running if request.end <= self._progress]
        for request in ended:
            del self._running[request]
        self._start_waiting()
        for request in ended:
            request.on_done(request)
