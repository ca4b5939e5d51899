"""The trainer's side of publishing: which version, when, and the probe that proves the engine got it right."""

import collections

import numpy as np
import torch
from torch import Tensor

from cluster import Cluster
from config import Config
from controller import Controller
from data.records import Group
from packing import TrainSequence
from policy import Policy
from weight_sync import Announcement

NUM_PROBES = 4
MAX_PROBE_TOKENS = 256  # and one below the engine's context length, as it must have room to sample one more


class Publisher:
    """Publishes policy versions, `publish_delay` steps late. Every rank has one; only a leader's has a controller."""

    def __init__(self, config: Config, policy: Policy, cluster: Cluster, controller: Controller | None, transport):
        self.config, self.policy, self.cluster = config, policy, cluster
        self.controller, self.transport = controller, transport
        self._probes: list[TrainSequence] = []
        self._probe_logprobs: dict[int, list[np.ndarray]] = {}  # version -> the trainer's own
        self._snapshots: collections.deque[tuple[int, list[tuple[str, Tensor]]]] = collections.deque()

    def choose_probes(self, groups: list[Group] | None) -> None:
        """Take the first trajectories of a node's batch as its probe, if there is none yet; collective on the node."""
        if self._probes:
            return
        chosen = None
        if groups is not None:
            length = min(MAX_PROBE_TOKENS, self.config.max_sequence_tokens - 1)
            chosen = [_probe(group.trajectories[0].tokens[:length]) for group in groups[:NUM_PROBES]]
        self._probes = self.cluster.broadcast_on_node(chosen)

    def publish(self, trainer_version: int, evaluate: bool) -> None:
        """Publish the version that is due after the step which made `trainer_version`; collective.

        The last step's is due at once, as no sample is trained on any more. With `evaluate` the held-out problems are
        sampled at the published version.
        """
        self._score_probes(trainer_version)
        version, parameters = trainer_version, self.policy.named_full_parameters()
        if self.config.publish_delay and trainer_version < self.config.steps:
            version, parameters = self._delayed(trainer_version, parameters)
        if self.controller is None:
            for _ in parameters:  # gathering is collective; only leaders keep what they gather
                pass
            return
        evaluate |= self.controller.withdraw()
        self.controller.wait_for_buffer()
        staged = self.transport.stage(version, parameters)
        if self.config.colocate == "sleep":
            torch.cuda.empty_cache()  # what the step needed is the engine's again when it wakes
        probe = tuple(tuple(p.tokens.tolist()) for p in self._probes)
        self.controller.publish(Announcement(version, trainer_version, staged, probe, evaluate))

    def _delayed(self, trainer_version: int, parameters) -> tuple[int, list[tuple[str, Tensor]]]:
        """Keep a copy of these weights on the CPU and return those of `publish_delay` steps ago, or the first."""
        copies = []
        for name, tensor in parameters:  # gathering is collective; only leaders keep what they gather
            if self.controller is not None:
                copies.append((name, tensor.to("cpu", copy=True)))
        self._snapshots.append((trainer_version, copies))
        while self._snapshots[0][0] < trainer_version - self.config.publish_delay:
            self._snapshots.popleft()
        return self._snapshots[0]

    def _score_probes(self, version: int) -> None:
        if not self._probes:
            return
        scores = self.policy.score([[probe] for probe in self._probes], raw=True)
        if self.controller is not None:
            self._probe_logprobs[version] = [score.numpy() for score in scores]

    def mismatch(self, engine_logprobs: dict[int, tuple[np.ndarray, ...]]) -> dict[str, float]:
        """Compare the engine's probe log-probs with the trainer's own at the same version.

        Takes version -> log-probs per probe. Returns `mismatch/*` of the newest version that both have scored, in
        nats over all probe tokens, or nothing.
        """
        versions = sorted(self._probe_logprobs.keys() & engine_logprobs.keys())
        if not versions:
            return {}
        trainer = np.concatenate(self._probe_logprobs[versions[-1]]).astype(np.float64)
        engine = np.concatenate(engine_logprobs[versions[-1]]).astype(np.float64)
        for version in [v for v in self._probe_logprobs if v <= versions[-1]]:
            del self._probe_logprobs[version]
        gap = trainer - engine
        return {
            "mismatch/k3": float(np.mean(np.expm1(gap) - gap)),
            "mismatch/abs_mean": float(np.abs(gap).mean()),
            "mismatch/abs_max": float(np.abs(gap).max()),
        }


def _probe(tokens: np.ndarray) -> TrainSequence:
    """A sequence of which every token but the first is scored, and none is trained on."""
    unused = np.zeros(len(tokens), dtype=np.float32)
    return TrainSequence(tokens, np.arange(len(tokens)) > 0, unused, np.zeros(len(tokens), np.int32), 0.0, 0.0)
