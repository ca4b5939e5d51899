"""Checkpoints of a run: when one is due, and how it is written while training goes on.

The cut is at the end of a step, when its weights are published: there every rank copies its part of the trainer's state
to host memory, and every leader what its controller knows. A thread on each rank writes the copies, with collectives of
its own group: beside the old checkpoint, flushed, with the digest of every file, and renamed when all is there.
"""

import datetime
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from cluster.processes import Interrupted, has_lost_a_rank
from controller.state import ControllerState
from data.plain import encode
from job.node import Node, is_due
from job.publisher import Publisher
from job.resume import set_aside
from records.batches import weights_sha256
from records.manifest import PART, checkpoints_in, flush, measured, write_manifest
from trainer.checkpoint import (
    StagedState,
    WeightWriter,
    check_finite,
    check_space,
    copies_on_rank_0,
    make_stager,
    num_state_bytes,
    read_full_weights,
    write_shards,
)
from trainer.lora import named_base_parameters
from trainer.policy import Policy

GRACE_S = 20.0
"""Longest wait for a checkpoint that is being written when the run ends by an error, seconds."""
OUT_OF_TIME = 75
"""Exit status of a run that --stop-after-s has stopped: EX_TEMPFAIL, try again."""
KEPT_TO_RESUME = 2
"""Checkpoints that keep what --resume needs where all are kept."""


@dataclass
class Saving:
    """A checkpoint that is being written, on this rank."""

    step: int
    state: StagedState
    delayed: dict[int, list]
    """Full weights of versions that publish_delay holds back, on leaders."""
    rollout: ControllerState | None
    """What this node sampled and was sampling, on leaders."""
    probe: tuple[tuple[int, ...], ...]
    began: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    took_s: float | None = None
    """How long it took; None while it goes on, or when it has failed."""
    error: Exception | None = None


class Checkpoints:
    """Saves a run at the end of its steps. Every rank has one; as a context, signals then end the run after a step."""

    def __init__(self, node: Node, policy: Policy):
        """Make what saving needs and, in a run that goes on, have the policy go on; collective."""
        self.node, self.policy, config = node, policy, node.config
        timeout = datetime.timedelta(seconds=2 * config.timeout_s)
        self._group = dist.new_group(timeout=timeout, backend="gloo")  # two threads cannot share one
        self._stager = make_stager(node.device)
        if node.resumed is not None:
            policy.restore(str(node.resumed.part), self._group)
            if node.cluster.is_first:
                set_aside(node.resumed)
        model, self._frozen = policy.module.model, {}
        if config.lora_rank:
            self._frozen = copies_on_rank_0((n, p.detach().full_tensor()) for n, p in named_base_parameters(model))
        self._folder = self._find_folder()
        self._writer = WeightWriter(model, policy.model_path) if node.cluster.is_first and self._folder else None
        self._frozen_sha256 = None
        self._saving: Saving | None = None
        self._handlers: dict[int, Any] = {}
        self._asked_by = 0  # number of the signal that asks the run to stop
        self._step_ended, self._longest_step_s, self._longest_save_s = time.monotonic(), 0.0, 0.0

    def _find_folder(self) -> Path | None:
        """Where checkpoints go, a folder that all nodes share; None if they share none. Collective."""
        cluster, config = self.node.cluster, self.node.config
        name = [self.node.run.path.name if cluster.is_first else None]
        dist.broadcast_object_list(name, src=0, device="cpu")
        run = Path(config.runs_dir) / name[0]
        (is_elsewhere,) = cluster.max_over_ranks([not (run / "run.json").exists()])
        if is_elsewhere and cluster.is_first:
            print(
                f"warning: not all nodes have {run}: checkpoints will have the weights, and nothing to --resume from; "
                "give a --runs-dir that they share",
                flush=True,
            )
        return None if is_elsewhere else run / "checkpoints"

    # When

    def __enter__(self) -> "Checkpoints":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._ask)
        self._step_ended = time.monotonic()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self.finish()
        elif self._saving is not None:
            self._saving.thread.join(GRACE_S)

    def _ask(self, number: int, frame) -> None:
        """Have the run stop after the running step; a second signal, or a lost node or rank, ends it at once."""
        cluster, watch = self.node.cluster, self.node.watch
        if self._asked_by or watch.reason is not None or has_lost_a_rank(len(cluster.local_ranks)):
            self._handlers[number](number, frame)
        self._asked_by = number
        if cluster.is_leader:
            name = signal.Signals(number).name
            print(f"{name}: saves and ends after this step; a second signal ends the run at once", flush=True)

    def save_if_due(self, step: int, publisher: Publisher) -> None:
        """Save every `save_every`-th step, the last, and the one after which the run is to stop; collective.

        Raises Interrupted when it stops, and OSError if the checkpoint before this one could not be written.
        """
        config, now = self.node.config, time.monotonic()
        self._longest_step_s = max(self._longest_step_s, now - self._step_ended)
        mine = [is_due(step, config.save_every, config.steps), self._asked_by, self._is_out_of_time()]
        due, number, is_late = self.node.cluster.max_over_ranks([int(wish) for wish in mine])
        if due or number or is_late:
            self.node.clock.enter("save")
            self._save(step, publisher)
            if step < config.steps and (number or is_late):
                self.finish()
                limit = f"--stop-after-s {config.stop_after_s:g} is nearly over"
                reason, status = (signal.Signals(number).name, 128 + number) if number else (limit, OUT_OF_TIME)
                raise Interrupted(f"stopped by {reason} after step {step}, which is saved: --resume goes on", status)
        self._step_ended = time.monotonic()

    def _is_out_of_time(self) -> bool:
        """Whether one more step and its checkpoint may end after `stop_after_s`, if each takes as long as ever."""
        if not self.node.config.stop_after_s:
            return False
        elapsed_s = time.time() - psutil.Process().create_time()
        save_s = self._longest_save_s or self._longest_step_s
        return elapsed_s + self._longest_step_s + save_s > self.node.config.stop_after_s

    # What

    def _save(self, step: int, publisher: Publisher) -> None:
        """Copy what is saved, and have it written in the background."""
        if self._folder is None:
            self.policy.save(str(self.node.run.checkpoint_path(step)) if self.node.cluster.is_first else "")
            return
        self.finish()
        rollout = self.node.controller.cut(self.node.run.sizes) if self.node.cluster.is_leader else None
        state = self._stager.stage(self.policy.state())
        self._saving = Saving(step, state, publisher.delayed, rollout, self.node.probe.tokens)
        self._saving.thread = threading.Thread(target=self._write, args=(self._saving,), name="save", daemon=True)
        self._saving.thread.start()

    def finish(self) -> None:
        """Wait until what was saved last is on disk. Raises OSError if it could not be written."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.thread.join()
        if saving.error is not None:
            raise saving.error
        if saving.took_s is None:
            raise RuntimeError(f"the thread that wrote the checkpoint of step {saving.step} has died: see above")
        self._longest_save_s = max(self._longest_save_s, saving.took_s)

    # In the background

    def _write(self, saving: Saving) -> None:
        """Write a checkpoint; collective on the threads of all ranks."""
        final = self._folder / f"step_{saving.step}"
        partial, is_first = final.with_name(f"{final.name}.tmp"), self.node.cluster.is_first
        try:
            self._together(lambda: self._begin(partial, final, saving) if is_first else None)
            self._together(lambda: check_finite(saving.state))
            write_shards(saving.state, str(partial / PART), self._group)
            found = self._together(lambda: self._write_own(partial, saving))
            self._together(lambda: self._end(partial, final, saving, found) if is_first else None)
            saving.took_s = time.monotonic() - saving.began
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            saving.error = OSError(f"checkpoint {final} was not written: {reason}")
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)

    def _together(self, act: Callable[[], Any]) -> list:
        """Have all ranks act, and give what each returned. Raises OSError on all if it fails on any."""
        try:
            mine = (act(), None)
        except (OSError, SafetensorError) as error:
            mine = (None, str(error) or type(error).__name__)
        everyone = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        for _, reason in everyone:
            if reason is not None:
                raise OSError(reason)
        return [result for result, _ in everyone]

    def _begin(self, partial: Path, final: Path, saving: Saving) -> None:
        """Make the folder to write to, if there is room."""
        partial.parent.mkdir(exist_ok=True)
        if final.exists():
            raise FileExistsError(f"{final} exists already")
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed here
        of_state, of_weights = num_state_bytes(saving.state), num_state_bytes(self._frozen)
        of_weights += sum(t.nbytes for n, t in saving.state.items() if n.startswith("weights."))
        of_delayed = sum(t.nbytes for weights in saving.delayed.values() for _, t in weights)
        check_space(of_state + of_weights + of_delayed, str(partial.parent), "weights and optimizer state")
        (partial / PART).mkdir(parents=True)

    def _write_own(self, partial: Path, saving: Saving) -> dict:
        """Write what only this rank has, beside its shards. Returns the digests of all that it wrote, and on leaders
        what the manifest says of the node."""
        part, cluster = partial / PART, self.node.cluster
        written = list(part.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
        if cluster.is_leader:
            written.append(part / f"node_{cluster.node}.msgpack")
            written[-1].write_bytes(encode(saving.rollout))
            self.node.run.flush()
        if cluster.is_first:
            self._writer.write(*read_full_weights(str(part), self._frozen), str(partial))
            for version, weights in saving.delayed.items():
                save_file(dict(weights), part / f"delayed_{version}.safetensors")
            written += [*part.glob("delayed_*"), *(p for p in partial.rglob("*") if p.is_file() and p.parent != part)]
        for file in written:
            flush(file)
        facts = {"records": saving.rollout.records, "probe": saving.probe} if cluster.is_leader else None
        return {"files": {str(file.relative_to(partial)): measured(file) for file in written}, "node": facts}

    def _end(self, partial: Path, final: Path, saving: Saving, found: list[dict]) -> None:
        """Write the manifest, give the checkpoint its name, and delete what is not to be kept."""
        nodes = [of_rank["node"] for of_rank in found if of_rank["node"]]
        files = {name: of for of_rank in found for name, of in of_rank["files"].items()}
        write_manifest(
            partial,
            files,
            step=saving.step,
            num_nodes=len(nodes),
            frozen_sha256=self._digest_of_frozen(),
            probes=[node["probe"] for node in nodes],
            records=[node["records"] for node in nodes],
            delayed=list(saving.delayed),
        )
        for folder in {partial, *(path.parent for path in partial.rglob("*"))}:
            flush(folder)
        partial.rename(final)
        flush(final.parent)
        self._prune()

    def _digest_of_frozen(self) -> str:
        """Digest of the model's files where the run goes on needing them: below adapters, or as a reference."""
        if self._frozen_sha256 is None:
            needs = self.node.config.lora_rank or self.node.config.kl_coef
            self._frozen_sha256 = weights_sha256(self.policy.model_path) if needs else ""
        return self._frozen_sha256

    def _prune(self) -> None:
        """Delete checkpoints that are not to be kept, or of them what only --resume needs."""
        keep = self.node.config.keep_last
        for path in list(checkpoints_in(self._folder))[: -(keep or KEPT_TO_RESUME)]:
            gone = path if keep else path / PART
            doomed = self._folder / f"{path.name}.old-{os.getpid()}"
            gone.rename(doomed)  # at once; what is left of it is no checkpoint
            shutil.rmtree(doomed)
