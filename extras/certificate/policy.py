"""The trainer's part of `--certificate`: snapshots of weights, the draw of responses, and their scores.

A snapshot is this rank's shards of the trained weights, in host memory and in the dtype of computing. FSDP casts the
weights to that dtype, so a score under a snapshot is that of its version. The live float32 weights are copied before a
check and restored after it, to the bit.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.cluster.cluster import gather_from_ranks
from asyncrl.job.arrival import ALLOWED_MISMATCH
from asyncrl.plugins import PolicyPlugin
from asyncrl.trainer.model import compute_dtype
from asyncrl.trainer.packing import Bundle, MicroBatch, TrainSequence, with_equal_counts
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.sharding import free_gathered_weights, own_shard
from asyncrl.trainer.splitting import fill_microbatches
from extras.certificate.rules import SCORES, TOKEN, describe_tokens, judge

NUM_RESPONSES = 32
"""Responses of a check, over all ranks."""
WINDOWS = (1, 4, 16)
"""Numbers of the newest checks that are judged together."""
MAX_KEPT = 2**17
"""Most tokens of older checks that are kept. With long responses the windows have fewer checks."""
Snapshot = list[Tensor]


class Certificate(PolicyPlugin):
    """Scores trained tokens again under the weights of their stamped versions."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._trained = [weight for weight in policy.module.parameters() if weight.requires_grad]
        self._dtype = compute_dtype(policy.config, policy.device)
        self._reach = policy.config.max_staleness + 1
        """Versions behind the step's that a check can need: the oldest stamp's, and the one before it."""
        self._snapshots: dict[int, Snapshot] = {}
        """By version."""
        self._pending: Snapshot | None = None
        """Snapshot before the step that runs. `metrics` gets its version."""
        self._version: int | None = None
        """Version that the last step trained."""
        self._sequences: list[TrainSequence] = []
        """Sequences with a trained token that this rank has in the step."""
        self._is_new_step = True
        self._step_version = -1
        """Version that the step trains, from this rank's tokens; -1 before a rank has tokens."""
        self._is_checking = False
        self._checks: deque[np.ndarray] = deque(maxlen=max(WINDOWS))
        """Tokens [N] of TOKEN of each of the newest checks, oldest first."""

    def extend_batch(self, batch: MicroBatch, bundles: list[Bundle]) -> MicroBatch:
        """Remember the sequences of a step, and take a snapshot before its first update; the batch is unchanged."""
        if self._is_checking:
            return batch
        if self._is_new_step:
            self._is_new_step = False
            self._forget_old_snapshots()
            self._pending = self._take_snapshot() if self._is_needed() else None
        sequences = itertools.chain(*(bundle.sequences for bundle in bundles))
        self._sequences += [sequence for sequence in sequences if sequence.num_trained]
        versions = batch.lags + batch.columns["policy_versions"]
        self._step_version = max([self._step_version, *versions[:1].tolist()])
        return batch

    def metrics(self) -> dict[str, float]:
        """Return `certificate/*` if a check follows the step; collective."""
        sequences = self._end_step()
        config, version = self._policy.config, self._version
        if not config.is_due(version + 1, config.certificate):
            return {}
        start = time.monotonic()
        tokens = self._check(sequences, version)
        while sum(map(len, self._checks)) > MAX_KEPT:
            self._checks.popleft()
        self._checks.append(tokens)
        windows = [np.concatenate([*self._checks][-number:]) for number in WINDOWS]
        allowed = ALLOWED_MISMATCH[config.dtype_on(self._policy.device.type)]
        values = describe_tokens(tokens) | judge(windows, allowed, config.on_update != "keep")
        values["seconds"] = max(gather_from_ranks(time.monotonic() - start))
        return {f"certificate/{name}": value for name, value in values.items()}

    def _end_step(self) -> list[TrainSequence]:
        """Name the step's snapshot by its version. Return the step's sequences; collective."""
        self._version = max(gather_from_ranks(self._step_version))
        if self._pending is not None:
            self._snapshots[self._version] = self._pending
        sequences, self._sequences = self._sequences, []
        self._is_new_step, self._pending, self._step_version = True, None, -1
        return sequences

    def _forget_old_snapshots(self) -> None:
        """Drop the snapshots that no check of the step that begins can need, so that a new one has room."""
        if self._version is not None:
            oldest = self._version + 1 - self._reach
            self._snapshots = {v: kept for v, kept in self._snapshots.items() if v >= oldest}

    def _is_needed(self) -> bool:
        """Return whether a later check can need the weights of the step that begins."""
        if self._version is None:
            return True
        config, version = self._policy.config, self._version + 1
        steps = range(version + 1, version + self._reach + 2)
        return any(config.is_due(step, config.certificate) for step in steps)

    def _take_snapshot(self) -> Snapshot:
        shards = (own_shard(weight.detach()) for weight in self._trained)
        return [shard.to("cpu", self._dtype, copy=True) for shard in shards]

    def _check(self, sequences: list[TrainSequence], version: int) -> np.ndarray:
        """Draw responses of the step that trained `version`, and score them; collective.

        Returns the tokens [N] of TOKEN of all ranks.
        """
        policy, rank, num_ranks = self._policy, dist.get_rank(), dist.get_world_size()
        numbers = range(rank, NUM_RESPONSES, num_ranks)[: len(sequences)]
        generator = np.random.default_rng((policy.config.seed, version, rank))
        places = generator.permutation(len(sequences))[: len(numbers)]
        drawn = [sequences[place] for place in places]
        budget, layout = policy.config.max_tokens_per_microbatch, policy.module.layout
        (microbatches,) = with_equal_counts([fill_microbatches(drawn, budget, layout) or [[]]])
        columns = [
            _describe(sequence, number + version * NUM_RESPONSES, version)
            for number, sequence in zip(numbers, itertools.chain(*microbatches), strict=True)
        ]
        tokens = np.concatenate([np.zeros(0, TOKEN), *columns])
        stamps = version - tokens["lag"]
        needed = {version, *(stamps - 1), *stamps, *(stamps + 1)}
        needed = set().union(*gather_from_ranks({int(number) for number in needed}))
        scores = self._score(microbatches, sorted(needed), version + 1)
        for column, offset in (("stamped", 0), ("before", -1), ("after", 1)):
            for number, logprobs in scores.items():
                is_of = stamps + offset == number
                tokens[column][is_of] = logprobs[is_of]
        tokens["now"] = scores[version]
        return np.concatenate(gather_from_ranks(tokens))

    def _score(
        self, microbatches: list[list[Bundle]], versions: Iterable[int], live_version: int
    ) -> dict[int, np.ndarray]:
        """Return the log-probs of the trained tokens, [N] nats, under each version that is kept; collective."""
        self._is_checking = True
        batches = [self._policy.pack_to_train(bundles, live_version) for bundles in microbatches]
        self._is_checking = False
        scores = {}
        if live_version in versions:
            scores[live_version] = self._logprobs(batches)
        with self._restored_weights():
            for version in versions:
                if version in self._snapshots:
                    self._load(self._snapshots[version])
                    scores[version] = self._logprobs(batches)
        return scores

    @torch.no_grad()
    def _logprobs(self, batches: list[MicroBatch]) -> np.ndarray:
        """Return the log-probs of all trained tokens under the loaded weights, [N] nats; collective."""
        policy = self._policy
        parts = [policy.forward(policy.module, batch).logprobs.cpu() for batch in batches]
        free_gathered_weights(policy.module)
        return torch.cat(parts).numpy()

    @torch.no_grad()
    def _load(self, snapshot: Snapshot) -> None:
        """Copy a snapshot into this rank's shards."""
        for weight, shard in zip(self._trained, snapshot, strict=True):
            own_shard(weight).copy_(shard)

    @contextmanager
    def _restored_weights(self) -> Iterator[None]:
        """Restore the weights at the end, to the bit."""
        free_gathered_weights(self._policy.module)
        live = [own_shard(weight.detach()).to("cpu", copy=True) for weight in self._trained]
        try:
            yield
        finally:
            self._load(live)


def _describe(sequence: TrainSequence, response: int, version: int) -> np.ndarray:
    """Return the trained tokens of a sequence as TOKEN, [N], without scores."""
    tokens = np.zeros(sequence.num_trained, TOKEN)
    stamps = sequence.policy_versions[sequence.loss_mask]
    tokens["response"] = response
    tokens["lag"] = version - stamps
    tokens["after_update"] = np.maximum.accumulate(stamps != stamps[0])
    tokens["recorded"] = sequence.behavior_logprobs[sequence.loss_mask]
    for name in SCORES:
        tokens[name] = np.nan
    return tokens
