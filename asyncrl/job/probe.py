"""Compares the engines' weights with the trainer's: both score the same probe at every publish, and must agree.

Nothing else shows a weight that never arrived: rewards still come in, and the loss is finite. If the first weights of a
run differ by much more than rounding, the run ends. Smaller and later differences bring one warning. The run always
ends if an engine surely has older weights than it reports.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.job.arrival import Arrivals
from asyncrl.messages import Probed, ProbedVersions, TokenSequences
from asyncrl.records import Group
from asyncrl.trainer.model import compute_dtype
from asyncrl.trainer.packing import TrainSequence

if TYPE_CHECKING:
    from asyncrl.trainer.policy import Policy

MIN_SEQUENCES = 4
"""Random sequences before the first batch. Later as many of the batch are always taken."""
NUM_SEQUENCES = {torch.float32: 4, torch.bfloat16: 128, torch.float16: 128}
"""Most sequences. There are many if rounding hides the change of a version. A request costs milliseconds."""
NUM_TOKENS = 2048
"""Most tokens of all sequences together."""
MAX_SHARE = 1 / 16
"""A further sequence is taken while all taken tokens are at most this share of the batch's. Each sequence counts up to
MAX_TOKENS."""
MAX_TOKENS = 256
"""Longest sequence. It stays one below the engine's context length, so that the engine can sample a token."""
NUM_VERSIONS = 64
"""Versions with kept log-probs, besides the versions of publish_delay: a slow worker loads a version late."""


@dataclass(frozen=True)
class Mismatch:
    """Difference of an engine's and the trainer's log-probs of the probe at one version, over all tokens."""

    worker: int
    version: int
    k3: float
    """KL estimate k3, nats per token."""
    abs_mean: float
    """Mean of |difference|, nats."""
    abs_max: float
    """Largest |difference|, nats."""
    decoded: float
    """Mean of |difference| within the engine, between decoded tokens and the same tokens read as a prompt, nats."""

    @classmethod
    def measure(cls, worker: int, probed: Probed, trainer: np.ndarray) -> "Mismatch":
        """Compare an engine's scores with the trainer's log-probs [N] float32 nats of the same tokens."""
        gap = trainer.astype(np.float64) - np.concatenate(probed.logprobs)
        k3 = float(np.mean(np.expm1(gap) - gap))
        sampled, read = np.concatenate(probed.decoded, axis=1)
        decoded = float(np.abs(sampled - read).mean())
        size = np.abs(gap)
        return cls(worker, probed.version, k3, float(size.mean()), float(size.max()), decoded)

    def metrics(self) -> dict[str, float]:
        """Return the metrics `mismatch/*`."""
        names = ("k3", "abs_mean", "abs_max", "decoded")
        return {f"mismatch/{name}": getattr(self, name) for name in names}

    def describe(self, allowed: float, transport: str) -> str | None:
        """Return the fault and its likely causes, in one line; `allowed` is of ALLOWED_MISMATCH."""
        if self.abs_mean <= allowed and self.decoded <= allowed:  # NaN is not
            return None
        if self.abs_mean <= allowed:
            return (
                f"worker {self.worker} samples with other weights than it reads prompts with: at version "
                f"{self.version} its log-probs of the same tokens differ by {self.decoded:.3g} nats on average, "
                f"{allowed:g} is allowed. Likely causes: a layer whose CUDA graph keeps old weights, or a kernel that "
                "decodes in another way; try another --model"
            )
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
        """Token ids of each sequence that is of the first batch; empty before it."""
        self._scores = {
            version: Scores(_as_tokens(tokens), np.array(logprobs, np.float32))
            for version, tokens, logprobs in saved["scores"]
        }
        self._newest: dict[int, dict[str, float]] = {}
        self.arrivals: dict[int, Arrivals] = defaultdict(Arrivals)
        """Measurements of each worker's weights."""
        self._waiting: dict[tuple[int, int], np.ndarray] = {}
        """Version and worker -> the engine's log-probs, until the trainer has scored the version after."""

    def state(self, versions: Iterable[int]) -> dict:
        """Return the sequences, and the trainer's scores at `versions`, in plain data.

        `versions` are Checkpoint.held_back. A resume announces the first again.
        """
        kept = {version: self._scores[version] for version in versions}
        return {
            "tokens": self.tokens,
            "scores": [
                (version, scores.tokens, scores.logprobs.tolist())
                for version, scores in kept.items()
            ],
        }

    def tokens_at(self, version: int) -> TokenSequences:
        """Return the sequences that the trainer has scored at a version; empty if it has not, or long ago."""
        return self._scores[version].tokens if version in self._scores else ()

    def choose(self, groups: list[Group] | None, policy: "Policy", cluster: Cluster) -> None:
        """Take trajectories of a node's batch, if the probe has no trajectories yet; collective on the node.

        The first member of each group comes first, because members begin alike.
        """
        if not self.tokens:
            members = zip(*(group.trajectories for group in groups or []), strict=False)
            tokens = [t.tokens[: self._length] for t in itertools.chain(*members)]
            num_batch_tokens = sum(map(len, tokens))
            tokens = tokens[: NUM_SEQUENCES[compute_dtype(self._config, policy.device)]]
            most = min(NUM_TOKENS, self._config.max_tokens_per_microbatch)
            num_read = np.cumsum([len(ids) for ids in tokens])
            is_cheap = num_read <= MAX_SHARE * num_batch_tokens
            is_cheap[:MIN_SEQUENCES] = True
            num_chosen = int((is_cheap & (num_read <= most)).sum())
            chosen_tokens = _as_tokens(ids.tolist() for ids in tokens[: max(1, num_chosen)])
            self.tokens = cluster.broadcast_on_node(chosen_tokens)

    def score(self, policy: "Policy", version: int) -> None:
        """Have the trainer score the probe at a version; collective."""
        tokens = self.tokens or self._random_tokens(policy)
        arrays = [np.array(ids, np.int64) for ids in tokens]
        sequences = [TrainSequence.to_score(ids, np.arange(len(ids)) > 0) for ids in arrays]
        (logprobs,) = policy.logprobs_of([sequences], raw=True)
        self._scores[version] = Scores(tokens, logprobs.numpy())
        self._scores.pop(version - NUM_VERSIONS - self._config.publish_delay, None)

    def _random_tokens(self, policy: "Policy") -> TokenSequences:
        """Return token ids from the whole vocabulary, the same on all ranks."""
        vocab_size = policy.module.model.config.get_text_config().vocab_size
        generator = np.random.default_rng(self._config.seed)
        shape = (MIN_SEQUENCES, self._length)
        return _as_tokens(generator.integers(0, vocab_size, shape).tolist())

    def compare(self, probed: ProbedVersions) -> list[Mismatch]:
        """Compare what engines scored with the trainer's scores.

        Returns the mismatch of each worker at each version that both have scored, oldest version first.
        """
        mismatches = [
            Mismatch.measure(worker, message, self._scores[version].logprobs)
            for version in sorted(self._scores.keys() & probed.keys())
            for worker, message in probed[version].items()
        ]
        for mismatch in mismatches:
            version, worker = mismatch.version, mismatch.worker
            self._newest[worker] = mismatch.metrics()
            self._waiting[version, worker] = np.concatenate(probed[version][worker].logprobs)
        return mismatches

    def compare_neighbours(self) -> list[tuple[int, int]]:
        """Compare engines with the trainer's versions before and after, too. Returns each new version and worker."""
        compared = []
        for version, worker in sorted(key for key in self._waiting if key[0] + 1 in self._scores):
            engine = self._waiting.pop((version, worker))
            scores = [self._scores.get(version + step) for step in (-2, -1, 0, 1)]
            if None in scores or len({score.tokens for score in scores}) > 1:
                continue
            is_new = _is_new(scores[0].tokens)
            arrivals = self.arrivals[worker]
            arrivals.add(version, engine[is_new], [score.logprobs[is_new] for score in scores])
            if arrival := arrivals.whole:
                metrics = {
                    "mismatch/versions_behind": arrival.versions_behind,
                    "mismatch/versions_behind_error": arrival.versions_behind_error,
                }
                self._newest.setdefault(worker, {}).update(metrics)
                compared.append((version, worker))
        return compared

    def take_newest(self) -> list[dict[str, float]]:
        """Take the newest metrics of each worker that was compared since the last call."""
        newest, self._newest = self._newest, {}
        return list(newest.values())


def _is_new(tokens: TokenSequences) -> np.ndarray:
    """Mark the scored tokens [N] whose prefix is in no earlier sequence; equal prefixes have equal log-probs."""
    prefixes: set[tuple[int, ...]] = set()
    is_new = []
    for sequence in tokens:
        for end in range(2, len(sequence) + 1):
            is_new.append(sequence[:end] not in prefixes)
            prefixes.add(sequence[:end])
    return np.array(is_new, bool)


def _as_tokens(sequences: Iterable[Iterable[int]]) -> TokenSequences:
    return tuple(map(tuple, sequences))
