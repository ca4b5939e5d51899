"""What a run goes on from (--resume): its newest whole checkpoint, its options, and how far its records count.

A checkpoint, runs/NAME/checkpoints/step_N, has weights for people, and below resume/ the rest: shards of the trainer's
state, node_K.msgpack with what node K sampled and was sampling, versions that publish_delay holds back, and
manifest.json with the digest of every file. It appears by one rename; a file that is cut or changed later is found.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from config import Config, flag
from records.manifest import PART, checkpoints_in, read_manifest, step_of

if TYPE_CHECKING:
    from cluster.cluster import Cluster
    from controller.state import ControllerState

MAY_CHANGE = (
    "steps", "lr", "save_every", "keep_last", "stop_after_s", "eval_every", "wandb", "num_rollout_workers",
    "rollout_tp", "max_running_requests", "weight_sync", "colocate", "gpu_memory_utilization", "replicas",
    "save_memory", "max_tokens_per_microbatch", "compile", "listen", "join_timeout_s", "swarm_args", "timeout_s",
    "env_timeout_s", "data_path",
)  # fmt: skip
"""Options that a run may go on with changed: how long, what is kept, and where and by whom it is computed."""


# Options


def resumed_config(chosen: dict) -> Config:
    """The config of a run that goes on: its own, with `chosen` options on top, of which one is `resume`.

    Raises ValueError, in one line, if there is no such run, or an option may not change.
    """
    run = Path(chosen["resume"])
    place = {"run_name": run.resolve().name, "runs_dir": str(run.parent)}
    own = replace(_recorded(run), **place)
    changed = {name: value for name, value in chosen.items() if name != "resume" and value != getattr(own, name)}
    for name, value in changed.items():
        if name not in MAY_CHANGE:
            allowed = ", ".join(f"--{flag(other)}" for other in MAY_CHANGE)
            raise ValueError(
                f"--{flag(name)} {value} cannot change when a run goes on: {run} has {getattr(own, name)}; leave it "
                f"out, or begin a new run. What may change: {allowed}"
            )
    config = replace(own, **changed, resume=str(run))
    if config.swarm.refresh_lag != own.swarm.refresh_lag:
        lags = f"{config.swarm.refresh_lag} cannot change when a run goes on: {run} has {own.swarm.refresh_lag}"
        raise ValueError(f"--swarm-args refresh_lag={lags}, and samples that are as old; leave it")
    return config


def _recorded(run: Path) -> Config:
    try:
        options = json.loads((run / "run.json").read_text(encoding="utf-8"))["config"]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"--resume {run}: no run is there ({error}); give a run's directory, runs/NAME") from None
    if unknown := options.keys() - {field.name for field in fields(Config)}:
        raise ValueError(f"--resume {run}: made by other code, which had {', '.join(sorted(unknown))}; use that code")
    return replace(Config.from_dict(options), resume=None)


# Checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, and what its manifest says."""

    path: Path
    step: int
    num_nodes: int
    frozen_sha256: str
    """Of the files of the weights that are not trained (LoRA, reference), which it does not have; empty without."""
    probes: list[list[list[int]]]
    """Token ids of the sequences of each node's probe."""
    records: list[dict[str, int]]
    """How many bytes of each of its records count, by node."""
    delayed: list[int]
    """Versions whose weights are in delayed_VERSION.safetensors."""
    skipped: list[str]
    """Newer checkpoints that are not whole, and why."""

    @property
    def part(self) -> Path:
        """Folder of what is not for people."""
        return self.path / PART

    def probe_of(self, node: int) -> list[list[int]]:
        """The probe that a node goes on with."""
        return self.probes[node % self.num_nodes]

    def event(self, cluster: "Cluster") -> dict:
        """What is recorded, on each leader, of where the run goes on."""
        records = self.records[cluster.node] if cluster.node < self.num_nodes else {}
        return {"step": self.step, "records": records, "skipped": self.skipped}

    def delayed_path(self, version: int) -> Path:
        """Where the weights of a version are that publish_delay held back."""
        return self.part / f"delayed_{version}.safetensors"

    def controller_of(self, model_path: str, cluster: "Cluster", config: Config) -> "ControllerState":
        """What a leader's controller goes on from, whatever the number of nodes was.

        Raises ValueError if the weights of the model that are not in the checkpoint have changed.
        """
        from controller.state import ControllerState, redistribute
        from data.plain import decode
        from records.batches import weights_sha256

        if self.frozen_sha256 and self.frozen_sha256 != weights_sha256(model_path):
            raise ValueError(f"--resume {config.resume}: the weights in {model_path} are not those that it began with")
        parts = [(self.part / f"node_{node}.msgpack").read_bytes() for node in range(self.num_nodes)]
        states = [decode(ControllerState, part) for part in parts]
        return redistribute(states, cluster.num_nodes)[cluster.node]


def find_checkpoint(config: Config, cluster: "Cluster") -> Checkpoint | None:
    """The checkpoint that --resume goes on from, which rank 0 looks for; None for a new run. Collective.

    Raises ValueError on all ranks if there is none. If no step is left to make, says so and ends the process well.
    """
    if config.resume is None:
        return None
    import torch.distributed as dist

    found: list[Checkpoint | str] = [""]
    if cluster.is_first:
        try:
            found = [newest_checkpoint(Path(config.resume))]
        except ValueError as error:
            found = [str(error)]
    dist.broadcast_object_list(found, src=0, device="cpu")
    if isinstance(found[0], str):
        raise ValueError(found[0])
    path = Path(config.resume) / "checkpoints" / found[0].path.name  # as this node names it
    checkpoint = replace(found[0], path=path)
    if cluster.is_first:
        for reason in checkpoint.skipped:
            print(f"warning: skipped checkpoint {reason}", flush=True)
    if checkpoint.step >= config.steps:
        if cluster.is_first:
            made = f"{config.resume} has made {checkpoint.step} steps of {config.steps}"
            print(f"finished already: {made}; to go on, raise --steps", flush=True)
        sys.exit(0)
    return checkpoint


def newest_checkpoint(run: Path) -> Checkpoint:
    """The newest whole checkpoint of a run. Raises ValueError if there is none."""
    skipped = []
    for path in reversed(list(checkpoints_in(run / "checkpoints"))):
        try:
            return Checkpoint(path=path, skipped=skipped, **read_manifest(path))
        except ValueError as error:
            skipped.append(str(error))
    reasons = "".join(f"; {reason}" for reason in skipped)
    raise ValueError(f"--resume {run}: no whole checkpoint is there{reasons}; begin a new run")


def set_aside(checkpoint: Checkpoint) -> None:
    """Rename what is newer than a checkpoint, as it is not whole, so that its steps may be saved again; and delete what
    was half written, or half deleted."""
    for path in checkpoint.path.parent.iterdir():
        if step_of(path) > checkpoint.step:
            path.rename(path.with_name(f"{path.name}.torn-{os.getpid()}"))
        elif re.fullmatch(r"step_\d+\.(tmp|old-\d+)", path.name):
            shutil.rmtree(path)
