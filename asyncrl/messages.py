"""What the controller and a rollout worker say to each other, over one pipe per worker and in order."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from asyncrl.records import Completion, Ticket, Trajectory

IdleReason = Literal["weights", "version", "bound", "evaluation"]

TokenSequences = tuple[tuple[int, ...], ...]
"""Token ids of each sequence."""
MAX_DECODED = 1, 16
"""Sequences of a probe from which an engine samples, and tokens that it samples from each, at most."""


def decoded_lengths(probe: TokenSequences) -> list[int]:
    """Return how many last tokens of the first sequences an engine replaces by tokens that it samples."""
    num_sequences, num_tokens = MAX_DECODED
    return [min(num_tokens, len(tokens) - 1) for tokens in probe[:num_sequences]]


# What they carry


@dataclass
class SampledTokens:
    """Tokens that the engine has returned since they were last asked for."""

    new: int = 0
    """All of them, those of aborted requests included."""
    resumed: int = 0
    """Those that continued a response which an update had interrupted."""
    discarded: int = 0
    """Those that `restart` threw away."""


@dataclass(frozen=True)
class ActivityReport:
    """What a rollout worker did since its last report."""

    changes: tuple[tuple[int, str, str], ...]
    """When it entered a state, Unix ns; the state; and why, where there are several reasons."""
    until: int
    """Unix ns."""


# Messages: controller -> worker


@dataclass(frozen=True)
class Tickets:
    """Start these trajectories."""

    tickets: list[Ticket]


@dataclass(frozen=True)
class Connect:
    """Connect the engine to the trainer's weight transport."""

    init_info: dict


@dataclass(frozen=True)
class Update:
    """Load new weights, then score the probe under them."""

    version: int
    update_infos: list[dict]
    probe: TokenSequences
    """Sequences whose log-probs the trainer computed at the same version; may be empty."""


@dataclass(frozen=True)
class Abort:
    """Stop these trajectories; each comes back as `aborted` with the tokens it has."""

    ticket_ids: list[int]


@dataclass(frozen=True)
class Suspend:
    """Stop sampling until the next update; what is running continues then."""


@dataclass(frozen=True)
class ReportProgress:
    """Say at once how far your responses are (`InFlight`), and sample on."""


@dataclass(frozen=True)
class Idle:
    """Reason why the worker has no ticket; only its time ledger reads it."""

    reason: IdleReason
    """`weights`: none is loaded yet. `version`: queued tickets need newer weights. `bound`: the staleness bound is
    reached. `evaluation`: it is reached because an evaluation delays new weights. Otherwise the worker is starved."""


@dataclass(frozen=True)
class Sleep:
    """Stop sampling and give up the GPU's memory until the next update."""


@dataclass(frozen=True)
class Stop:
    """Shut down."""


# Messages: worker -> controller


@dataclass(frozen=True)
class Ready:
    """The engine is up and waits for its first weights."""

    startup_s: float


@dataclass(frozen=True)
class Receiving:
    """The engine is paused and waits for the weights of its update: the trainer is to send them (`nccl`)."""


@dataclass(frozen=True)
class Asleep:
    """The engine has given up its memory."""


@dataclass(frozen=True)
class Updated:
    """The engine samples with `version` now."""

    version: int
    pause_s: float
    """Time during which no request could make progress, seconds."""
    sampled: SampledTokens
    """Tokens returned by the engine since the update before."""
    activity: ActivityReport | None
    """None from a worker that keeps no time ledger."""


@dataclass(frozen=True)
class Probed:
    """The engine's log-probs of the probe under `version`."""

    version: int
    logprobs: tuple[np.ndarray, ...]
    """[T − 1] float32, nats, of each sequence's tokens from the second on, at temperature 1."""
    decoded: tuple[np.ndarray, ...]
    """[2, n] float32, nats, of n sampled tokens as in `decoded_lengths`: as they were sampled, and as a prompt."""


ProbedVersions = dict[int, dict[int, Probed]]
"""Version -> worker -> its scores."""


@dataclass(frozen=True)
class Finished:
    """Trajectories that ended since the last message; all those of one ticket come together."""

    trajectories: list[Trajectory]
    activity: ActivityReport | None
    """None where there is nothing new to say."""


@dataclass(frozen=True)
class InFlight:
    """How far the responses are that have not ended."""

    partials: dict[int, Completion]
    """Ticket -> its response, of one token at least."""
    lost: dict[int, int]
    """Ticket -> tokens of what nobody can continue: responses of several turns, or of a group by one request."""


@dataclass(frozen=True)
class Stopped:
    """The last word of a worker that was told to stop."""

    activity: ActivityReport
