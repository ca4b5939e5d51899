"""The messages between the controller and a rollout worker. Each worker has one pipe, and it keeps their order."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from asyncrl.records import Completion, Ticket, Trajectory

IdleReason = Literal["weights", "version", "bound", "evaluation"]

TokenSequences = tuple[tuple[int, ...], ...]
"""Token ids of each sequence."""
MAX_DECODED = 1, 16
"""Most sequences of a probe that an engine continues, and most tokens that it samples for each."""


def decoded_lengths(probe: TokenSequences) -> list[int]:
    """Return how many last tokens an engine replaces by sampled tokens, in each of the first sequences."""
    num_sequences, num_tokens = MAX_DECODED
    return [min(num_tokens, len(tokens) - 1) for tokens in probe[:num_sequences]]


# Contents of messages


@dataclass
class SampledTokens:
    """Counts of tokens that the engine returned since the last report."""

    new: int = 0
    """All tokens, also of interrupted requests."""
    resumed: int = 0
    """Tokens of responses that an update had interrupted, after the update."""
    discarded: int = 0
    """Tokens that `restart` discarded."""


@dataclass(frozen=True)
class ActivityReport:
    """States of a rollout worker since its last report."""

    changes: tuple[tuple[int, str, str], ...]
    """Time of a change of state, Unix ns; the new state; and the reason, or empty."""
    until: int
    """End of the report, Unix ns."""


# Messages: controller -> worker


@dataclass(frozen=True)
class Tickets:
    """Start these tickets."""

    tickets: list[Ticket]


@dataclass(frozen=True)
class Connect:
    """Connect the engine to the trainer's weight transport."""

    init_info: dict


@dataclass(frozen=True)
class LoadWeights:
    """Load new weights, then score the probe under them."""

    version: int
    update_infos: list[dict]
    probe: TokenSequences
    """Sequences whose log-probs the trainer computed at the same version; can be empty."""


@dataclass(frozen=True)
class Abort:
    """Stop these tickets. Their trajectories are returned as `aborted`, with their tokens so far."""

    ticket_ids: list[int]


@dataclass(frozen=True)
class Suspend:
    """Stop sampling until the next update. Running responses continue then."""


@dataclass(frozen=True)
class ReportProgress:
    """Send an `InFlight` at once, and continue to sample."""


@dataclass(frozen=True)
class Idle:
    """Reason why the worker has no ticket, for its time ledger."""

    reason: IdleReason
    """`weights`: not loaded yet. `version`: queued tickets need newer weights. `bound`: the staleness bound is reached.
    `evaluation`: it is reached because an evaluation delays new weights. Otherwise the worker is starved."""


@dataclass(frozen=True)
class Sleep:
    """Stop sampling and free the GPU's memory until the next update."""


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
    """The engine is paused and waits for the weights of its update. The trainer must send them (`nccl`)."""


@dataclass(frozen=True)
class Asleep:
    """The engine has freed its memory."""


@dataclass(frozen=True)
class WeightsLoaded:
    """The engine now samples with `version`."""

    version: int
    pause_s: float
    """Seconds without progress of any request."""
    sampled: SampledTokens
    """Tokens since the last update."""
    activity: ActivityReport | None
    """None from a worker without a time ledger."""


@dataclass(frozen=True)
class Probed:
    """The engine's log-probs of the probe under `version`."""

    version: int
    logprobs: tuple[np.ndarray, ...]
    """[T − 1] float32, nats, at temperature 1: each sequence's tokens from the second on."""
    decoded: tuple[np.ndarray, ...]
    """[2, n] float32, nats: n sampled tokens (`decoded_lengths`) when sampled, and when read as a prompt."""


ProbedVersions = dict[int, dict[int, Probed]]
"""Scores by version and worker."""


@dataclass(frozen=True)
class Finished:
    """Trajectories that ended since the last message. All trajectories of a ticket come together."""

    trajectories: list[Trajectory]
    activity: ActivityReport | None
    """None from a worker without a time ledger."""


@dataclass(frozen=True)
class InFlight:
    """Progress of the running responses."""

    partials: dict[int, Completion]
    """Ticket → its response so far, at least one token. Multi-turn responses and group requests cannot be continued."""


@dataclass(frozen=True)
class Stopped:
    """The last message of a worker that got Stop."""

    activity: ActivityReport
