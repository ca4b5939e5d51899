"""A simulated inference engine: how fast it decodes by the number of requests that run, and what that does to each.

The curve has measured points, or those of a roofline model. Requests that run at the same time decode at the same rate
(continuous batching), so one number, the tokens that each has decoded since the engine started, gives the progress of
all of them: a request is done when it has grown by the request's length. A prefill holds the engine up for its time.
"""

import bisect
import dataclasses
import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from extras.simulation.clock import Clock

BYTES_PER_VALUE = 2  # bfloat16 weights and KV cache


@dataclass(frozen=True)
class Model:
    """What a roofline needs of a language model; numbers from its configuration on the Hugging Face hub."""

    num_parameters: float
    num_layers: int
    num_kv_heads: int
    head_size: int = 128

    @property
    def kv_bytes(self) -> int:
        """KV cache of one token, bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * BYTES_PER_VALUE


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet: dense bfloat16 operations/s, bytes/s and bytes of memory."""

    flops: float
    bytes_per_s: float
    memory_bytes: float


MODELS = {
    "Qwen3-0.6B": Model(0.6e9, 28, 8),
    "Qwen3-4B": Model(4.0e9, 36, 8),
    "Qwen3-8B": Model(8.2e9, 36, 8),
    "R1-Distill-Qwen-1.5B": Model(1.8e9, 28, 2),
}
GPUS = {
    "H800": Gpu(989e12, 3.35e12, 80e9),
    "MI300X": Gpu(1307e12, 5.3e12, 192e9),
    "M2 Pro": Gpu(14e12, 2e11, 16e9),
}

# Assumed, and the same for every model and GPU: what real kernels reach of the data sheet, and the host's part.
BANDWIDTH_EFFICIENCY = 0.7
FLOPS_EFFICIENCY = 0.4
STEP_OVERHEAD_S = 0.003
MEMORY_SHARE = 0.9
MAX_RUNNING_REQUESTS = 128
"""Per engine, if its memory holds as many: ROLL's default."""


@dataclass(frozen=True)
class EngineCurve:
    """Speed of one engine."""

    decode: tuple[tuple[float, float], ...]
    """(running requests, tokens/s per request), by rising number of requests."""
    prefill_tokens_per_s: float
    max_running_requests: int
    """Requests that run at the same time at most; others wait in the engine."""

    def rate(self, num_requests: float) -> float:
        """Tokens/s per request; its inverse is linear between points and beyond the last, constant before the first."""
        points = self.decode
        if num_requests <= points[0][0]:
            return points[0][1]
        right = min(bisect.bisect_left(points, (num_requests,)), len(points) - 1)
        (n0, rate0), (n1, rate1) = points[right - 1], points[right]
        seconds = 1 / rate0 + (1 / rate1 - 1 / rate0) * (num_requests - n0) / (n1 - n0)
        return 1 / seconds

    def times(self, speed: float) -> "EngineCurve":
        """The curve of an engine that is so many times as fast."""
        decode = tuple((requests, speed * rate) for requests, rate in self.decode)
        return EngineCurve(decode, speed * self.prefill_tokens_per_s, self.max_running_requests)

    @classmethod
    def load(cls, path: Path) -> "EngineCurve":
        """Read a curve from JSON."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**fields, "decode": tuple(tuple(point) for point in fields["decode"])})


def roofline(model: str, gpu: str, mean_context_tokens: float, num_gpus: int = 1) -> EngineCurve:
    """Curve of `num_gpus` tensor-parallel GPUs. A step of n requests, each of mean_context_tokens, takes

    overhead + max(2·P·n / (flops·0.4), (2·P + n·context·kv_bytes) / (bandwidth·0.7)) seconds,

    with P parameters (2 floating-point operations and 2 bytes each); prefill is bound by flops. Communication between
    the GPUs is not counted.
    """
    num_parameters, sheet = MODELS[model].num_parameters, GPUS[gpu]
    flops = num_gpus * sheet.flops * FLOPS_EFFICIENCY
    bandwidth = num_gpus * sheet.bytes_per_s * BANDWIDTH_EFFICIENCY
    weights = BYTES_PER_VALUE * num_parameters
    kv_bytes = mean_context_tokens * MODELS[model].kv_bytes
    room = num_gpus * sheet.memory_bytes * MEMORY_SHARE - weights
    if room < kv_bytes:
        raise ValueError(
            f"{num_gpus} x {gpu} cannot hold {model} and one context: {room:.3g} B are left"
        )

    def seconds(n: int) -> float:
        return STEP_OVERHEAD_S + max(
            2 * num_parameters * n / flops, (weights + n * kv_bytes) / bandwidth
        )

    return EngineCurve(
        tuple((n, 1 / seconds(n)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 2 * MAX_RUNNING_REQUESTS)),
        flops / (2 * num_parameters),
        min(MAX_RUNNING_REQUESTS, int(room / kv_bytes)),
    )


@dataclass(frozen=True)
class Swarm:
    """What holds for workers on hosts that join and leave; see extras/simulation/swarm.py."""

    weight_bytes: float
    delta_share: float
    """Share of the weights that one step changes; 1 for whole copies."""
    uplink_bytes_per_s: float
    """Of the trainer, for all that pull; infinite if they pull from a file system without such a limit."""
    stay_s: float
    """Mean time that a host stays."""


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
    swarm: Swarm | None = None
    """None if the workers stay; else there are num_workers on average."""

    @property
    def num_slots(self) -> int:
        """Responses that are sampled at the same time at most (K of ROLL Flash)."""
        return self.num_workers * self.num_replicas * self.curve.max_running_requests


@dataclass(slots=True, eq=False)
class Request:
    """One response, or one turn of it, on its way through an engine."""

    num_tokens: int
    prefill_tokens: int
    on_done: Callable[["Request"], None]
    start: float = -1.0
    end: float = -1.0
    """The engine's progress when it starts and when it is done, tokens."""
    started_at: float = -1.0
    """Seconds."""


class SimulatedEngine:
    """`num_replicas` engines of one curve that share their load evenly, as a data-parallel engine does."""

    def __init__(self, clock: Clock, curve: EngineCurve, num_replicas: int = 1):
        self.clock, self.curve, self.num_replicas = clock, curve, num_replicas
        self.max_running = curve.max_running_requests * num_replicas
        self._slot_s = 0.0
        self.versions: list[tuple[int, float]] = []
        """(policy version, progress at which it was loaded)."""
        self._order = itertools.count()
        self._running: set[Request] = set()
        self._ends: list[tuple[float, int, Request]] = []
        self._waiting: deque[Request] = deque()
        self._progress = 0.0  # tokens that every running request has decoded since the beginning
        self._stalled_s = 0.0  # prefill that is due before anything decodes
        self._updated_at = 0.0
        self._is_frozen = False
        self._rate = curve.rate(1)
        self._wake_number = 0

    def slot_s_now(self) -> float:
        """Seconds that slots have been taken until now, summed over slots."""
        self._advance()
        return self._slot_s

    def add(self, request: Request) -> None:
        """Start a request, or have it wait for a slot."""
        self._advance()
        self._waiting.append(request)
        self._start_waiting()

    def remove(self, request: Request) -> int:
        """Abort a request; returns the tokens that it has."""
        self._advance()
        if request not in self._running:
            if request in self._waiting:
                self._waiting.remove(request)
            return 0
        self._running.discard(request)
        done = int(self._progress - request.start)
        self._start_waiting()
        return done

    def stop(self) -> None:
        """Give up all requests, for good."""
        self.freeze()
        self._running.clear()

    def freeze(self) -> None:
        """Stand still until `resume`."""
        self._advance()
        self._is_frozen = True
        self._wake_number += 1

    def resume(self, version: int, recompute: bool) -> None:
        """Go on under `version`; with `recompute` the KV cache of everything that runs is computed anew first."""
        self._advance()
        self._is_frozen = False
        self.versions.append((version, self._progress))
        if recompute:
            # in any order
            tokens = math.fsum(r.prefill_tokens + self._progress - r.start for r in self._running)
            self._stall(tokens)
        self._start_waiting()

    def segments(self, request: Request, num_tokens: int) -> list[tuple[int, int]]:
        """(version, tokens) of each part of what a request has decoded, in order, without empty parts."""
        parts, end = [], num_tokens
        for version, loaded_at in reversed(self.versions):
            start = min(end, max(0, round(loaded_at - request.start)))
            if end > start:
                parts.append((version, end - start))
            end = start
            if loaded_at <= request.start:
                break
        return parts[::-1]

    def _stall(self, num_tokens: float) -> None:
        self._stalled_s += num_tokens / (self.curve.prefill_tokens_per_s * self.num_replicas)

    def _advance(self) -> None:
        """Bring progress up to now."""
        passed = self.clock.now - self._updated_at
        self._updated_at = self.clock.now
        self._slot_s += passed * len(self._running)
        if self._is_frozen or not self._running:
            return
        stalled = min(passed, self._stalled_s)
        self._stalled_s -= stalled
        self._progress += (passed - stalled) * self._rate

    def _start_waiting(self) -> None:
        """Give free slots to those that wait, and look forward to the next that is done."""
        while self._waiting and len(self._running) < self.max_running and not self._is_frozen:
            request = self._waiting.popleft()
            request.start, request.started_at = self._progress, self.clock.now
            request.end = self._progress + request.num_tokens
            self._running.add(request)
            heapq.heappush(self._ends, (request.end, next(self._order), request))
            self._stall(request.prefill_tokens)
        if self._running:
            self._rate = self.curve.rate(len(self._running) / self.num_replicas)
        self._wait_for_next()

    def _wait_for_next(self) -> None:
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        self._wake_number += 1
        if not self._ends or self._is_frozen:
            return
        number = self._wake_number
        delay = self._stalled_s + max(0.0, self._ends[0][0] - self._progress) / self._rate
        self.clock.after(delay, lambda: self._wake(number))

    def _wake(self, number: int) -> None:
        if number != self._wake_number:
            return  # something changed meanwhile
        self._advance()
        end = self._ends[0][0]
        # rounding may have left a little
        self._progress, self._stalled_s = max(self._progress, end), 0.0
        done = []
        while self._ends and (self._ends[0][0] <= end or self._ends[0][2] not in self._running):
            request = heapq.heappop(self._ends)[2]
            if request in self._running:
                self._running.discard(request)
                done.append(request)
        self._start_waiting()
        for request in done:
            request.on_done(request)
