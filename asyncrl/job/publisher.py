"""The trainer's side of publishing: it chooses the version, stages its weights, and announces them."""

import collections
from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from asyncrl.cluster.processes import CannotContinue, RolloutEnded
from asyncrl.job.engine_check import EngineCheck
from asyncrl.job.node import Follower, Leader
from asyncrl.records import Group
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.weight_files import describe_differences
from asyncrl.weights.transport import Announcement, ParameterSpec, Weights, gather_only

VersionedWeights = tuple[int, Weights]
"""A version and its weights."""


class Publisher:
    """Does a rank's part of publishing: it scores the probe, and helps to gather the weights."""

    def __init__(self, rank: Follower | Leader, policy: Policy):
        self.rank, self.policy, self.config = rank, policy, rank.config

    def publish(self, step: int, probe_source: list[Group] | None = None) -> None:
        """Publish the version that is due after a step; collective. Step 0 is the start.

        Every `eval_every` steps, at the start and after the last step, the published version samples the held-out
        problems. The first step's groups, `probe_source` on a leader, become the probe. The weights are gathered when
        they are read: while a leader copies them, and in a follower's `gather_only`.
        """
        self.rank.clock.enter("publish")
        self._score_probe(step, probe_source)
        self.check_engines(step)
        self.stage_and_announce(step, self.policy.sent_parameters())

    def _score_probe(self, step: int, probe_source: list[Group] | None) -> None:
        """Make the trainer's scores of the version, which engines must match. The probe is chosen once; collective."""
        probe = self.rank.probe
        if step:
            probe.choose(probe_source, self.policy, self.rank.cluster)
        probe.score(self.policy, step)

    def stage_and_announce(self, step: int, gathering_weights: Weights) -> None:
        """Gather the weights after a step; collective. A leader also stages and announces them."""
        gather_only(gathering_weights)

    def check_engines(self, step: int) -> None:
        """Compare the engines' scores with the trainer's, on a leader."""

    def check_last(self, version: int) -> None:
        """Compare the engines at the last published version, on a leader."""

    @property
    def held_back_to_save(self) -> dict[int, Weights]:
        """Copies of the weights that a checkpoint needs, by version: without the newest; empty on a follower."""
        return {}


class LeadingPublisher(Publisher):
    """Publishes policy versions, `publish_delay` steps late, to the workers of a node."""

    def __init__(self, rank: Leader, policy: Policy):
        """Join trainer and workers, and wait until all engines of this node are up."""
        super().__init__(rank, policy)
        specs = policy.sent_specs()
        if rank.cluster.is_first:
            print(f"attention of the trainer: {policy.module.attention}", flush=True)
            differs = describe_differences(policy.model_path, [spec.name for spec in specs])
            if differs:
                print(
                    f"warning: beside --model {policy.model_path}, checkpoints {differs}",
                    flush=True,
                )
        rank.connect_workers(specs)
        rank.share_cores(policy.module.model)
        self._engine_check = EngineCheck(rank)
        self._held_back = collections.deque(self._read_held_back(specs))
        """Copies of the weights of the newest versions, the published one first; empty without `publish_delay`."""

    def stage_and_announce(self, step: int, gathering_weights: Weights) -> None:
        """Copy the due weights into the transport when it has room, and announce them to the workers."""
        controller = self.rank.controller
        version, weights = step, gathering_weights
        if self.config.publish_delay and step != self.config.steps:
            self._hold_back(step, gathering_weights)
            version, weights = self._take_due_weights(step)
        # `take_back_deferred` always runs: it frees the buffer of the weights that wait for an evaluation.
        asked_before = controller.take_back_deferred()
        evaluates = asked_before or self._evaluates(step, version)
        try:
            staged = controller.stage(version, weights)
        except RolloutEnded:
            # The step is saved, and the next batch raises the error.
            gather_only(weights)
            return
        if self.config.colocate == "sleep":
            torch.cuda.empty_cache()  # what the step needed is the engine's again when it wakes
        controller.announce_or_defer(
            Announcement(version, step, staged, self.rank.probe.tokens_at(version), evaluates)
        )

    def _hold_back(self, step: int, gathering_weights: Weights) -> None:
        """Gather the newest weights in copies on the CPU; collective."""
        copies = [(name, tensor.to("cpu", copy=True)) for name, tensor in gathering_weights]
        self._held_back.append((step, copies))

    def _take_due_weights(self, step: int) -> VersionedWeights:
        """Forget older weights, and return the version that is due after a step, and its weights.

        A resumed run can have no weights of that version. Then the oldest ones are due.
        """
        while self._held_back[0][0] < self.config.version_to_announce(step):
            self._held_back.popleft()
        return self._held_back[0]

    def _evaluates(self, step: int, version: int) -> bool:
        """Return whether the version that is published after a step samples the held-out problems."""
        every = self.config.eval_every
        evaluates = every > 0 and self.config.is_due(step, every)
        if step and step == self.rank.first_version:
            # A resumed run publishes again. The checkpoint knows if an evaluation has begun, and if it has ended.
            state = self.rank.controller_state
            return state.evaluates or (evaluates and state.published_version < version)
        return evaluates

    def check_engines(self, step: int) -> None:
        self._engine_check.check(step)

    def check_last(self, version: int) -> None:
        """Compare the engines at the last version, with which the last evaluation was sampled.

        Raises CannotContinue if rollout has ended before.
        """
        controller = self.rank.controller
        newest = controller.announcements.newest
        has_version = newest is not None and newest.version == version
        try:
            if controller.ended_by is not None and (controller.evaluation or not has_version):
                raise controller.ended_by
            if self.rank.probe.tokens_at(version):
                controller.finish_probes(version)
                self.check_engines(version)
                if version > self.rank.first_version:
                    self._engine_check.finish()
        except RolloutEnded as error:
            raise CannotContinue(f"{error}; the last evaluation has not ended") from None

    @property
    def held_back_to_save(self) -> dict[int, Weights]:
        return dict(list(self._held_back)[:-1])

    def _read_held_back(self, specs: list[ParameterSpec]) -> Iterator[VersionedWeights]:
        """Yield the weights that the checkpoint has held back, but no older version than the published one.

        The last step of a run publishes the newest weights at once, so older ones may be there.
        """
        checkpoint = self.rank.checkpoint
        for version in checkpoint.delayed if checkpoint else ():
            if version >= self.rank.controller_state.published_version:
                weights = load_file(checkpoint.resume_folder / "delayed" / f"{version}.safetensors")
                yield version, [(spec.name, weights[spec.name]) for spec in specs]


def make_publisher(rank: Follower | Leader, policy: Policy) -> Publisher:
    """Return a rank's publisher; on a leader when all engines of its node are up."""
    return LeadingPublisher(rank, policy) if isinstance(rank, Leader) else Publisher(rank, policy)
