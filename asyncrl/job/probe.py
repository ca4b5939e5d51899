"""Whether the engines have the trainer's weights: both score the same probe at every publish, and must agree.

A weight that never arrived shows nowhere else: rewards still come in, and the loss is still finite. So the first
weights of a run end it if they are wrong, and later ones are warned of once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.messages import ProbedVersions, TokenSequences
from asyncrl.records import Group
from asyncrl.trainer.model import compute_dtype
from asyncrl.trainer.packing import TrainSequence

if TYPE_CHECKING:
    from asyncrl.job.node import Leader
    from asyncrl.trainer.policy import Policy

NUM_SEQUENCES = 4
MAX_TOKENS = 256
"""Longest sequence. It is also one below the engine's context length, as an engine must have room to sample a token."""
NUM_VERSIONS = 64
"""Versions, besides those of publish_delay, whose log-probs are kept: a slow worker loads a version late."""
ALLOWED_MISMATCH = {torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest mean difference of an engine that has the trainer's weights, nats per token, by the dtype of computing.

In float32 on a CPU the tiny model has 2e-6 on random tokens. In bfloat16 on a CPU it has 0.03, and SmolLM2-135M has
0.07, or 0.12 where a sequence has 16 tokens; 0.063 is the largest of 239 versions of its stored runs. In float16 on a
CPU the tiny model has 0.003 on random tokens. One norm of the tiny model that is not sent makes 0.4 and more. On a GPU
nothing is measured yet."""


@dataclass(frozen=True)
class Mismatch:
    """How far an engine's log-probs of the probe are from the trainer's at one version, over all tokens."""

    worker: int
    version: int
    k3: float
    """KL estimate k3, nats per token."""
    abs_mean: float
    """Mean of |difference|, nats."""
    abs_max: float
    """Largest |difference|, nats."""

    @classmethod
    def measure(
        cls, worker: int, version: int, trainer: np.ndarray, engine: np.ndarray
    ) -> "Mismatch":
        """Return how log-probs [N] float32 nats of the same tokens differ."""
        gap = trainer.astype(np.float64) - engine.astype(np.float64)
        k3 = float(np.mean(np.expm1(gap) - gap))
        return cls(worker, version, k3, float(np.abs(gap).mean()), float(np.abs(gap).max()))

    def metrics(self) -> dict[str, float]:
        """Return the metrics `mismatch/*`."""
        return {f"mismatch/{name}": getattr(self, name) for name in ("k3", "abs_mean", "abs_max")}

    def describe(self, allowed: float, transport: str) -> str:
        """Return what is wrong, and the likely causes, in one line; `allowed` is of ALLOWED_MISMATCH."""
        return (
            f"worker {self.worker} does not have the trainer's weights: at version {self.version} their log-probs of "
            f"the same tokens differ by {self.abs_mean:.3g} nats on average, {allowed:g} is allowed. Likely causes: "
            f"weights that did not arrive by --weight-sync {transport}, or a model that vLLM computes in another way "
            "than transformers; try another --weight-sync, or another --model"
        )


@dataclass(frozen=True)
class Scores:
    """The trainer's log-probs of the probe at one version."""

    tokens: TokenSequences
    logprobs: np.ndarray
    """[N] float32 nats, of all tokens but each sequence's first."""


class Probe:
    """Random tokens, and after the first batch some sequences of it; and the trainer's scores of them by version."""

    def __init__(self, config: Config, saved: dict | None = None):
        """`saved` is the `state` of a run that is resumed."""
        self._config = config
        self._length = min(MAX_TOKENS, config.max_sequence_tokens - 1)
        saved = saved or {"tokens": [], "scores": []}
        self.tokens = _as_tokens(saved["tokens"])
        """Token ids of each sequence that is of the first batch; none before it."""
        self._scores = {
            version: Scores(_as_tokens(tokens), np.array(logprobs, np.float32))
            for version, tokens, logprobs in saved["scores"]
        }
        self._newest: dict[int, Mismatch] = {}

    def state(self, versions: Iterable[int]) -> dict:
        """Return the sequences, and the trainer's scores at versions that are still to be announced, in plain data."""
        kept = {version: self._scores[version] for version in versions}
        return {
            "tokens": self.tokens,
            "scores": [
                (version, scores.tokens, scores.logprobs.tolist())
                for version, scores in kept.items()
            ],
        }

    def tokens_at(self, version: int) -> TokenSequences:
        """Return the sequences that the trainer has scored at a version; none if it has not, or long ago."""
        return self._scores[version].tokens if version in self._scores else ()

    def choose(self, groups: list[Group] | None, cluster: Cluster) -> None:
        """Take the first trajectories of a node's batch, if none are there yet; collective on the node."""
        if not self.tokens:
            first = [
                group.trajectories[0].tokens[: self._length]
                for group in (groups or [])[:NUM_SEQUENCES]
            ]
            self.tokens = cluster.broadcast_on_node(_as_tokens(tokens.tolist() for tokens in first))

    def score(self, policy: "Policy", version: int) -> None:
        """Have the trainer score the probe at a version; collective."""
        tokens = self.tokens or self._random_tokens(policy)
        arrays = [np.array(ids, np.int64) for ids in tokens]
        sequences = [TrainSequence.to_score(ids, np.arange(len(ids)) > 0) for ids in arrays]
        (logprobs,) = policy.score([sequences], raw=True)
        self._scores[version] = Scores(tokens, logprobs.numpy())
        self._scores.pop(version - NUM_VERSIONS - self._config.publish_delay, None)

    def _random_tokens(self, policy: "Policy") -> TokenSequences:
        """Return token ids from the whole vocabulary, the same on all ranks."""
        vocab_size = policy.module.model.config.get_text_config().vocab_size
        generator = np.random.default_rng(self._config.seed)
        return _as_tokens(generator.integers(0, vocab_size, (NUM_SEQUENCES, self._length)).tolist())

    def compare(self, engine_logprobs: ProbedVersions) -> list[Mismatch]:
        """Compare the engines' log-probs with the trainer's.

        Returns the mismatch of each worker at each version that both have scored, oldest version first.
        """
        mismatches = [
            Mismatch.measure(
                worker, version, self._scores[version].logprobs, np.concatenate(logprobs)
            )
            for version in sorted(self._scores.keys() & engine_logprobs.keys())
            for worker, logprobs in engine_logprobs[version].items()
        ]
        self._newest |= {mismatch.worker: mismatch for mismatch in mismatches}
        return mismatches

    def take_newest(self) -> list[Mismatch]:
        """Take the newest mismatch of each worker that was compared since the last call."""
        newest, self._newest = self._newest, {}
        return list(newest.values())


class EngineCheck:
    """Does what is to be done about engines whose weights are not the trainer's."""

    def __init__(self, node: "Leader") -> None:
        """Check the engines of a node, joined hosts included."""
        self._node = node
        self._allowed = ALLOWED_MISMATCH[compute_dtype(node.config, node.device)]
        self._has_warned = False
        self._first_version: int | None = None
        """The version that this start of the run compared first."""

    def check(self, step: int) -> None:
        """Compare what engines have scored since the last call with the trainer's scores of the same version.

        A worker of this node that has other weights is warned of, once. A joined host is shut out.
        Raises RuntimeError if the first weights that this start of the run compares are wrong.
        """
        node = self._node
        for mismatch in node.probe.compare(node.controller.take_probes()):
            node.run.record(
                "mismatch", worker=mismatch.worker, version=mismatch.version, **mismatch.metrics()
            )
            if self._first_version is None:
                self._first_version = mismatch.version
            if mismatch.abs_mean <= self._allowed:  # NaN is not
                continue
            problem = mismatch.describe(self._allowed, node.placement.transport)
            if node.controller.shuts_out(mismatch.worker, problem):
                continue
            if mismatch.version == self._first_version:
                raise RuntimeError(problem)
            if not self._has_warned:
                self._has_warned = True
                node.run.record("warning", text=f"step {step}: {problem}")
                print(f"warning: step {step}: {problem}", flush=True)


def _as_tokens(sequences: Iterable[Iterable[int]]) -> TokenSequences:
    return tuple(map(tuple, sequences))
