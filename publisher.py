"""The trainer's side of publishing: which version, when, and the probe that proves the engine got it right."""

import collections
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from cluster import Cluster
from config import Config
from controller import Controller
from data.records import Group
from exchange import Feed, Notice, Probe
from mismatch import Mismatch
from packing import TrainSequence
from policy import Policy
from weight_sync import Announcement

NUM_PROBES = 4
MAX_PROBE_TOKENS = 256  # and one below the engine's context length, as it must have room to sample one more


class Publisher:
    """Publishes policy versions, `publish_delay` steps late. Every rank has one; only a leader's has a controller, and
    it has none where its node only trains."""

    def __init__(self, config: Config, policy: Policy, cluster: Cluster, controller: Controller | None):
        self.config, self.policy, self.cluster, self.controller = config, policy, cluster, controller
        self.mismatch = Mismatch()
        self._feed = Feed(policy.sent_specs(), cluster) if cluster.is_leader else None
        self._probes: list[TrainSequence] = []
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
        if self._feed is None:
            _gather(parameters)
            return
        notice = Notice(version, trainer_version, self._probe_tokens(), self.mismatch.at(version), evaluate)
        parameters = self._feed.send(notice, parameters)
        if self.controller is not None:
            stage_and_announce(self.controller, notice, parameters)
        else:
            _gather(parameters)
            self.mismatch.forget_before(version)
        self._feed.wait()

    def _delayed(self, trainer_version: int, parameters) -> tuple[int, list[tuple[str, Tensor]]]:
        """Keep a copy of these weights on the CPU and return those of `publish_delay` steps ago, or the first."""
        copies, is_needed = [], self.controller is not None or (self._feed is not None and self._feed.followers)
        for name, tensor in parameters:  # gathering is collective
            copies.append((name, tensor.to("cpu", copy=True) if is_needed else tensor.new_empty(0)))
        self._snapshots.append((trainer_version, copies))
        while self._snapshots[0][0] < trainer_version - self.config.publish_delay:
            self._snapshots.popleft()
        return self._snapshots[0]

    def _probe_tokens(self) -> Probe:
        return tuple(tuple(probe.tokens.tolist()) for probe in self._probes)

    def _score_probes(self, version: int) -> None:
        if not self._probes:
            return
        (scores,) = self.policy.score([self._probes], raw=True)
        if self.cluster.is_leader:
            scored = [len(probe.tokens) - 1 for probe in self._probes]
            self.mismatch.note(version, [score.numpy() for score in scores.split(scored)])


def _gather(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Help to gather, which is collective, and keep nothing."""
    for _ in parameters:
        pass


def stage_and_announce(controller: Controller, notice: Notice, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights to where a node's workers read them, when there is room, and have the workers load them."""
    evaluate = controller.withdraw() or notice.evaluate
    controller.wait_for_buffer()
    staged = controller.transport.stage(notice.version, parameters)
    if controller.config.colocate == "sleep":
        torch.cuda.empty_cache()  # what the step needed is the engine's again when it wakes
    controller.publish(Announcement(notice.version, notice.trainer_version, staged, notice.probe, evaluate))


def _probe(tokens: np.ndarray) -> TrainSequence:
    """A sequence of which every token but the first is scored, and none is trained on."""
    unused = np.zeros(len(tokens), dtype=np.float32)
    return TrainSequence(tokens, np.arange(len(tokens)) > 0, unused, np.zeros(len(tokens), np.int32), 0.0, 0.0)
