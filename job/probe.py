"""How far apart engine and trainer are at the same weights: both score the same probe, and what differs is recorded."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from cluster.cluster import Cluster
from config import Config
from data.records import Group
from trainer.packing import TrainSequence

if TYPE_CHECKING:
    from trainer.policy import Policy

NUM_SEQUENCES = 4
MAX_TOKENS = 256  # and one below the engine's context length, as it must have room to sample one more
NUM_VERSIONS = 64
"""Versions whose log-probs are kept: a slow machine loads a version late, or not at all."""


class Probe:
    """Some sequences of the first batch, and the trainer's log-probs of them by version until an engine's come."""

    def __init__(self, config: Config, tokens: Iterable[Iterable[int]] = ()):
        """`tokens` are token ids of the sequences of a run that goes on."""
        self._length = min(MAX_TOKENS, config.max_sequence_tokens - 1)
        self._sequences = [_sequence(np.array(ids, dtype=np.int64)) for ids in tokens]
        self._own: dict[int, list[np.ndarray]] = {}

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of each sequence; none before the first batch."""
        return tuple(tuple(sequence.tokens.tolist()) for sequence in self._sequences)

    def choose(self, groups: list[Group] | None, cluster: Cluster) -> None:
        """Take the first trajectories of a node's batch, if none are there yet; collective on the node."""
        if self._sequences:
            return
        first = [group.trajectories[0].tokens[: self._length] for group in (groups or [])[:NUM_SEQUENCES]]
        self._sequences = cluster.broadcast_on_node([_sequence(tokens) for tokens in first])

    def score(self, policy: "Policy", version: int) -> None:
        """Have the trainer score it at a version, if there is one; collective."""
        if not self._sequences:
            return
        (scores,) = policy.score([self._sequences], raw=True)
        lengths = [len(sequence.tokens) - 1 for sequence in self._sequences]
        self._own[version] = [score.numpy() for score in scores.split(lengths)]
        self._own.pop(version - NUM_VERSIONS, None)

    def compare(self, engine_logprobs: dict[int, dict[int, tuple[np.ndarray, ...]]]) -> dict[int, dict[str, float]]:
        """Compare the engines' log-probs, version -> worker -> nats per token of each sequence, with the trainer's.

        Returns `mismatch/*` of each worker at the newest version that both have scored, in nats over all tokens.
        """
        found = {}
        for version in sorted(self._own.keys() & engine_logprobs.keys()):
            trainer = np.concatenate(self._own[version]).astype(np.float64)
            for worker, logprobs in engine_logprobs[version].items():
                gap = trainer - np.concatenate(logprobs).astype(np.float64)
                found[worker] = {
                    "mismatch/k3": float(np.mean(np.expm1(gap) - gap)),
                    "mismatch/abs_mean": float(np.abs(gap).mean()),
                    "mismatch/abs_max": float(np.abs(gap).max()),
                }
        return found


def _sequence(tokens: np.ndarray) -> TrainSequence:
    """A sequence of which every token but the first is scored, and none is trained on."""
    unused = np.zeros(len(tokens), dtype=np.float32)
    return TrainSequence(tokens, np.arange(len(tokens)) > 0, unused, np.zeros(len(tokens), np.int32), 0.0, 0.0)
