"""How far apart engine and trainer are at the same weights: both score the same probe, and what differs is recorded."""

import numpy as np


class Mismatch:
    """The trainer's own log-probs of the probe, by version, until an engine's of the same version come."""

    def __init__(self) -> None:
        self._own: dict[int, list[np.ndarray]] = {}

    def note(self, version: int, logprobs: list[np.ndarray]) -> None:
        """Keep the trainer's log-probs at a version, float32 nats per token of each sequence of the probe."""
        self._own[version] = logprobs

    def at(self, version: int) -> list[np.ndarray] | None:
        """The trainer's log-probs at a version, if they are still needed."""
        return self._own.get(version)

    def forget_before(self, version: int) -> None:
        """Drop what was noted of older versions."""
        self._own = {v: logprobs for v, logprobs in self._own.items() if v >= version}

    def compare(self, engine_logprobs: dict[int, tuple[np.ndarray, ...]]) -> dict[str, float]:
        """Compare the engine's log-probs of the probe, version -> nats per token of each sequence, with the trainer's.

        Returns `mismatch/*` of the newest version that both have scored, in nats over all probe tokens, or nothing.
        """
        versions = sorted(self._own.keys() & engine_logprobs.keys())
        if not versions:
            return {}
        trainer = np.concatenate(self._own[versions[-1]]).astype(np.float64)
        engine = np.concatenate(engine_logprobs[versions[-1]]).astype(np.float64)
        self.forget_before(versions[-1] + 1)
        gap = trainer - engine
        return {
            "mismatch/k3": float(np.mean(np.expm1(gap) - gap)),
            "mismatch/abs_mean": float(np.abs(gap).mean()),
            "mismatch/abs_max": float(np.abs(gap).max()),
        }
