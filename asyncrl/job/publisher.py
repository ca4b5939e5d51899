"""The trainer's side of publishing: it chooses the version, stages its weights, and announces them.

The calls of a version, from the trainer to the metrics:

1. `train_on` → `Publisher.publish` → `Probe.score`, `check_engines` → `stage_and_announce`.
2. `_choose_weights`. With publish_delay all later calls have an older version.
3. `Controller.stage` → `Transport.stage` → `write`: weights are copied into a buffer that no worker reads.
4. `Controller.announce_or_defer` → `announce` → `Announcements.send_to_workers` → `Worker.load` → `send_update`.
5. `LoadWeights` → `RolloutWorker._load_weights` → `LLMProxy.load_weights` → `_load` (sets the stamp) → in vLLM's
   process `ShmWeightTransferEngine.receive_weights`, or vLLM's own engine for ipc and nccl (`Receiving` →
   `Transport.send`). Then `read_completion` → `token_versions` reads the stamps.
6. `Finished` → `SampleBuffer.add`, `find_batch`: they check the stamps → `take_batch` → `share_batch` → `_segments`
   (copies the oldest version) → `Policy.train_step` → `lag_stats.staleness_metrics` → `StepLog.write`.
"""

import collections
from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from asyncrl.cluster.processes import CannotContinue, RolloutEnded
from asyncrl.job.engine_check import EngineCheck
from asyncrl.job.node import Follower, Leader
from asyncrl.records import Group
from asyncrl.runlog.manifest import HELD_BACK
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.weight_files import describe_differences
from asyncrl.weights.transport import Announcement, ParameterSpec, Weights, gather_only

VersionedWeights = tuple[int, Weights]
"""A version and its weights."""


class Publisher:
    """Does a rank's part of publishing: it scores the probe, and helps to gather the weights."""

    def __init__(self, rank: Follower | Leader, policy: Policy):
        self.rank, self.policy, self.config = rank, policy, rank.config

    def publish(self, trainer_version: int, probe_source: list[Group] | None = None) -> None:
        """Announce the version that is due, or a newer one, or defer it while an evaluation runs; collective.

        `trainer_version` is the policy's version: the step that has ended, or 0 at the start.
        Every `eval_every` steps, at the start and after the last step, the announced version samples the held-out
        problems. The first step's groups, `probe_source` on a leader, become the probe. The weights are gathered when
        they are read: while a leader copies them, and in a follower's `gather_only`.
        """
        self.rank.clock.enter("publish")
        probe = self.rank.probe
        if trainer_version:
            probe.choose(probe_source, self.policy, self.rank.cluster)
        # Engines must match the trainer's scores of the version.
        probe.score(self.policy, trainer_version)
        self.check_engines(trainer_version)
        self.stage_and_announce(trainer_version, self.policy.sent_parameters())

    def stage_and_announce(self, trainer_version: int, lazy_weights: Weights) -> None:
        """Gather the policy's weights; collective. A leader also stages and announces weights.

        Reading `lazy_weights` is the collective: all ranks gather each weight together.
        """
        gather_only(lazy_weights)

    def check_engines(self, step: int) -> None:
        """Compare the engines' scores with the trainer's, on a leader."""

    def check_last(self, version: int) -> None:
        """Compare the engines at the last published version, on a leader."""

    @property
    def held_back_to_save(self) -> dict[int, Weights]:
        """Copies of the weights that a checkpoint needs, by version; empty on a follower.

        They are from the announced version to the one before the trainer's, oldest first. A resume announces the first
        again, and holds back the policy's own weights again.
        """
        return {}


class LeadingPublisher(Publisher):
    """Publishes policy versions, `publish_delay` steps late, to the workers of a node."""

    def __init__(self, rank: Leader, policy: Policy):
        """Join trainer and workers, and wait until all engines of this node are up."""
        super().__init__(rank, policy)
        specs = policy.sent_specs()
        if rank.cluster.is_first:
            print(f"attention of the trainer: {policy.module.attention}", flush=True)
            print("waiting until all engines are up", flush=True)
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
        """Copies of weights, from the announced version to the trainer's, oldest first. It is empty without
        publish_delay, and after the last step."""
        state = rank.controller_state
        self._evaluated_version = -1 if state is None else state.published_version
        """Newest version whose evaluation was asked for; −1 before the first. With publish_delay a version can be
        announced several times, and its evaluations would be equal. A resumed run announces a version again only if it
        was evaluated."""

    def stage_and_announce(self, trainer_version: int, lazy_weights: Weights) -> None:
        """Copy the weights to announce into the transport when it has room, and announce them to the workers."""
        controller = self.rank.controller
        version, weights = self._choose_weights(trainer_version, lazy_weights)
        # `take_back_deferred` always runs. Else an evaluation that ends during `stage` would announce a buffer that is
        # being overwritten.
        asked_before = controller.take_back_deferred()
        evaluates = asked_before or self._evaluates(trainer_version, version)
        if evaluates:
            self._evaluated_version = version
        try:
            staged = controller.stage(version, weights)
        except RolloutEnded:
            # `stage` raises it before it reads. Weights that were not held back are still to be gathered, collectively.
            # The step is saved, and the next batch raises the error.
            gather_only(weights)
            return
        if self.config.colocate == "sleep":
            torch.cuda.empty_cache()  # the engine gets the step's memory again when it wakes
        probe = self.rank.probe.tokens_at(version)
        controller.announce_or_defer(
            Announcement(version, trainer_version, staged, probe, evaluates)
        )

    def _choose_weights(self, trainer_version: int, lazy_weights: Weights) -> VersionedWeights:
        """Return the version to announce, and its weights: lazy ones, or copies on the CPU that were held back.

        With publish_delay, copies are gathered here. The version is the oldest copy that is not older than
        `due_version`. A finished run that continues with more --steps has no older copies. So it first announces newer
        versions: staleness begins at 0 again, and reaches publish_delay as many steps later.
        After the last step no version follows, so the newest is announced at once. Older ones are forgotten: workers
        must not go back to them in a resume.
        """
        if trainer_version == self.config.steps:
            self._held_back.clear()
        elif self.config.publish_delay:
            copies = [(name, tensor.to("cpu", copy=True)) for name, tensor in lazy_weights]
            self._held_back.append((trainer_version, copies))
            while self._held_back[0][0] < self.config.due_version(trainer_version):
                self._held_back.popleft()
            return self._held_back[0]
        return trainer_version, lazy_weights

    def _evaluates(self, trainer_version: int, version: int) -> bool:
        """Return whether the announced version samples the held-out problems."""
        every = self.config.eval_every
        is_due = every > 0 and self.config.is_due(trainer_version, every)
        evaluates = is_due and version != self._evaluated_version
        if trainer_version and trainer_version == self.rank.first_version:
            # A resumed run publishes again. The checkpoint knows if an evaluation has begun, and if it has ended. If
            # rollout had ended before the version was announced, its evaluation has not begun.
            state = self.rank.controller_state
            return state.evaluates or (evaluates and state.published_version < version)
        return evaluates

    def check_engines(self, step: int) -> None:
        self._engine_check.check(step)

    def check_last(self, version: int) -> None:
        """Compare the engines at the last version. The last evaluation was sampled with it.

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
        # The last weights are the policy's own.
        return dict(list(self._held_back)[:-1])

    def _read_held_back(self, specs: list[ParameterSpec]) -> Iterator[VersionedWeights]:
        """Yield the weights in the checkpoint's held_back/, oldest first. The first version is announced again."""
        checkpoint = self.rank.checkpoint
        for version in checkpoint.held_back if checkpoint else ():
            weights = load_file(checkpoint.resume_folder / HELD_BACK / f"{version}.safetensors")
            yield version, [(spec.name, weights[spec.name]) for spec in specs]


def make_publisher(rank: Follower | Leader, policy: Policy) -> Publisher:
    """Return a rank's publisher; on a leader when all engines of its node are up."""
    return LeadingPublisher(rank, policy) if isinstance(rank, Leader) else Publisher(rank, policy)
