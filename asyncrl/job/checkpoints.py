"""When a run is saved, and how a signal, a limit of time or an error ends it.

A checkpoint is made at the end of a step, after its weights were published. The main thread of a rank copies its part
of the trainer's state to host memory. A leader also takes a snapshot of its controller. A thread then writes files and
manifest, renames the folder and prunes old checkpoints (asyncrl/trainer/checkpoint_writer.py). A run continues from
them by asyncrl/job/resume.py.

| error that ends the loop | raised by | last step |
|---|---|---|
| CannotContinue | Rank.wait_together, for a RolloutEnded such as WorkerDied; Publisher.check_last | is saved |
| NobodySamples | extras/swarm/node.py, if the run is asked to stop; becomes Interrupted | is saved |
| Interrupted | Checkpoints._stop, after a first signal or at the limit of time | is saved before |
| Interrupted | asyncrl/cluster/processes.py, at a second signal | is not saved |
| NotFinite | Policy.train_step; becomes RuntimeError, and the batch is kept | is not saved |
| any other | | is not saved |
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from asyncrl.cluster.cluster import max_over_ranks, on_first_rank
from asyncrl.cluster.processes import (
    STOP_SIGNALS,
    CannotContinue,
    Interrupted,
    has_lost_a_rank,
)
from asyncrl.job.node import Follower, Leader, NobodySamples
from asyncrl.job.publisher import Publisher
from asyncrl.job.resume import resume_hint
from asyncrl.plugins import last_given
from asyncrl.records import Group
from asyncrl.runlog.manifest import NodeFacts, clear_torn_checkpoints
from asyncrl.trainer.checkpoint_writer import (
    CheckpointWriter,
    LeaderPart,
    prune_weights,
    restore_training_state,
    training_state,
)
from asyncrl.trainer.new_folder import fail_together
from asyncrl.trainer.policy import NotFinite, Policy
from asyncrl.trainer.weight_files import save_weights

GRACE_S = 20.0
"""Longest wait for a checkpoint that is being written when the run ends by an error, seconds."""
OUT_OF_TIME = os.EX_TEMPFAIL
"""Exit status of a run that --stop-after-s has stopped."""


class Checkpoints:
    """Saves a run at the end of its steps. Every rank has one. In its context a signal ends the run after a step."""

    def __init__(self, rank: Follower | Leader, policy: Policy):
        """Make the writer; collective. Call `restore_policy_and_run_folder` and `allocate_copies` next."""
        self.rank, self.policy = rank, policy
        folder, is_shared = self._find_folder()
        self._saves_all = is_shared and rank.config.save == "all"
        self.writer = CheckpointWriter(policy, folder)
        # It is called when the rank ends, after an error has been reported.
        rank.on_end.callback(self.writer.close, GRACE_S)
        self._handlers: dict[int, Any] = {}
        self._signal_number = 0  # of the signal that asked the run to stop; 0 before
        self._last_step: tuple[int, Publisher] | None = None
        """The last step since this start of the run."""
        self._has_begun_save = False
        self._step_ended, self._longest_step_s = time.monotonic(), 0.0

    def restore_policy_and_run_folder(self) -> None:
        """Restore the policy of a resumed run, clear its torn checkpoints, and continue its records; collective."""
        checkpoint = self.rank.checkpoint
        if checkpoint is None:
            return
        restore_training_state(self.policy, str(checkpoint.resume_folder), self.writer.group)
        if self.rank.cluster.is_first:
            clear_torn_checkpoints(checkpoint)
            print(f"continues after step {checkpoint.step}: {checkpoint.path}", flush=True)
        # Wait until all ranks have read and accepted the checkpoint.
        dist.barrier(self.writer.group)
        if self.rank.cluster.is_leader:
            self.rank.run.continue_records()

    def allocate_copies(self) -> None:
        """Allocate the host memory for copies of the training state, by a first copy. Engines start meanwhile.

        In a new run it has no optimizer state yet. The first checkpoint allocates the rest. Weights alone need no copy.
        """
        if self._saves_all:
            self.writer.state_copier.stage(training_state(self.policy))

    def _find_folder(self) -> tuple[Path, bool]:
        """Return the folder of checkpoints, and whether all nodes share it; collective."""
        cluster = self.rank.cluster
        run = Path(self.rank.config.runs_dir) / on_first_rank(lambda: self.rank.run.path.name)
        (is_elsewhere,) = max_over_ranks([not (run / "run.json").exists()])
        if is_elsewhere and cluster.is_first and self.rank.config.save == "all":
            print(
                f"warning: not all nodes have {run}: checkpoints will have the weights, and nothing to --resume from; "
                "give a --runs-dir that they share",
                flush=True,
            )
        return run / "checkpoints", not is_elsewhere

    def __enter__(self) -> "Checkpoints":
        for number in STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._handle_signal)
        self._step_ended = time.monotonic()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if isinstance(error, NobodySamples):
                self._stop(*max_over_ranks([self._signal_number]))
            elif isinstance(error, CannotContinue):
                self._save_before_end(error)
            elif error is None:
                self.writer.wait()  # A first signal does not end this wait.
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _handle_signal(self, number: int, frame) -> None:
        """Stop the run after this step. After a second signal, or if a node or rank is lost, end it at once."""
        cluster, watch = self.rank.cluster, self.rank.watch
        if self._signal_number or watch.reason is not None or has_lost_a_rank():
            signal.signal(number, self._handlers[number])
            signal.raise_signal(number)
        self._signal_number = number
        if cluster.is_leader:
            self.rank.controller.is_asked_to_stop = True
            name = signal.Signals(number).name
            line = f"{name}: saves and ends after this step; a second signal ends the run at once"
            # print is not reentrant, and a signal can come inside it. The terminal can be gone.
            with contextlib.suppress(OSError):
                os.write(1, f"\n{line}\n".encode())

    @contextlib.contextmanager
    def keep_failed_batch(self, step: int, groups: list[Group] | None) -> Iterator[None]:
        """Train a step inside. If a loss or gradient is not finite, keep the batch and the weights before the update.

        Leaders give the batch, `groups`. Raises RuntimeError, with the path, on all ranks. Collective in that case.
        """
        try:
            yield
        except NotFinite as error:
            plugins = self.rank.config.plugins
            kept = (plugin.keep_batch(self.rank, self.policy, step, groups) for plugin in plugins)
            where = last_given(kept, "; its batch is not kept, as extras/recording.py is missing")
            raise RuntimeError(f"{error}{where}") from error

    def save_if_due(self, step: int, publisher: Publisher) -> None:
        """Save a step if --save-every asks for it, or if the run stops after it; collective.

        Raises Interrupted if the run stops. Raises OSError if the checkpoint before this one could not be written.
        """
        config, now = self.rank.config, time.monotonic()
        self._longest_step_s = max(self._longest_step_s, now - self._step_ended)
        is_due = config.save_every is not None and config.is_due(step, config.save_every)
        own_reasons = [int(is_due), self._signal_number, int(self._is_out_of_time())]
        is_due, signal_number, is_late = max_over_ranks(own_reasons)
        self._last_step = step, publisher
        self._has_begun_save = False
        if is_due or signal_number or is_late:
            self._begin_save(step, publisher)
        if step < config.steps and (signal_number or is_late):
            self._stop(signal_number)
        self._step_ended = time.monotonic()

    def _stop(self, signal_number: int) -> NoReturn:
        """Save the last step, if it is not saved, and raise Interrupted; collective.

        `signal_number` is 0 for the limit of time. Raises OSError as `save_if_due`.
        """
        reason = f"--stop-after-s {self.rank.config.stop_after_s:g}, which is nearly over,"
        status = OUT_OF_TIME
        if signal_number:
            reason = signal.Signals(signal_number).name
            status = 128 + signal_number
        if self._last_step is not None:
            reason = f"{reason} after step {self._last_step[0]}, which is saved"
            if not self._has_begun_save:
                self._begin_save(*self._last_step)
        self.writer.wait()
        self.rank.watch.finish()  # All nodes stop here, so no node is the cause.
        raise Interrupted(f"stopped by {reason}", status)

    def _save_before_end(self, error: CannotContinue) -> None:
        """Save the last step, if it is not saved, before an error ends the run; collective.

        The error gets a hint how to continue. If the checkpoint cannot be written, the error also has the reason.
        """
        if self._last_step is None:
            return  # No step was made since the start.
        separator = "\n" if "\n" in str(error) else "; "  # A dead worker's error ends with its log.
        try:
            if not self._has_begun_save and self._last_step[0] < self.rank.config.steps:
                self._begin_save(*self._last_step)
            self.writer.wait()
        except (OSError, RuntimeError) as failure:
            error.args = (f"{error}{separator}{failure}",)
        if self.rank.cluster.is_first:
            run = self.rank.run.path
            hint = resume_hint(run)
            if self._last_step[0] == self.rank.config.steps:
                hint = (
                    f"all steps are made; scripts/evaluate.py {run} samples the held-out problems"
                )
            error.args = (f"{error}{separator}{hint}",)
        self.rank.watch.finish()  # as in `_stop`

    def _is_out_of_time(self) -> bool:
        """Return whether the next step and its checkpoint could end after `stop_after_s`, by the longest so far."""
        if not self.rank.config.stop_after_s:
            return False
        elapsed_s = time.time() - psutil.Process().create_time()
        save_s = self.writer.longest_s or self._longest_step_s
        return elapsed_s + self._longest_step_s + save_s > self.rank.config.stop_after_s

    def _begin_save(self, step: int, publisher: Publisher) -> None:
        """Copy the state of the run, and begin to write it in the background."""
        rank = self.rank
        self._has_begun_save = True
        rank.clock.enter("save")
        if not self._saves_all:
            self._save_only_weights(step)
            return
        self.writer.wait()
        leader_part = None
        if rank.cluster.is_leader:
            controller_state, record_bytes = rank.controller.snapshot(rank.run.record_bytes)
            held_back = publisher.held_back_to_save
            node_facts = NodeFacts(
                rank.probe.state(held_back),
                record_bytes,
                rank.controller.ticket_source.prompts.digest,
            )
            facts_of_nodes = rank.cluster.gather(node_facts)
            leader_part = LeaderPart(
                rank.cluster.node, rank.run, controller_state, facts_of_nodes, held_back
            )
        self.writer.start(step, training_state(self.policy), leader_part)

    def _save_only_weights(self, step: int) -> None:
        """Write the weights of a step to the first node's folder; collective. Other nodes can lack that folder."""
        begun = time.monotonic()
        is_first = self.rank.cluster.is_first
        path = str(self.writer.folder / f"step_{step}") if is_first else ""
        save_weights(self.policy, path, self.writer.weights)
        with fail_together():
            if is_first:
                prune_weights(self.writer.folder, self.rank.config.keep_last)
        self.writer.longest_s = max(self.writer.longest_s, time.monotonic() - begun)
