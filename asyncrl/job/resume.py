"""What a run goes on from (--resume): its newest whole checkpoint, its options, and how far its records count.

A checkpoint, runs/NAME/checkpoints/step_N, has weights for people, and below resume/ the rest: shards of the trainer's
state, node_K.msgpack with what node K sampled and was sampling, versions that publish_delay holds back, and
manifest.json with the digest of every file. It appears by one rename; a file that is cut or changed later is found.
"""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import Config, flag
from asyncrl.runlog.header import read_header
from asyncrl.runlog.manifest import Checkpoint, newest_checkpoint
from asyncrl.user_code import found_again

if TYPE_CHECKING:
    from asyncrl.cluster.cluster import Cluster
    from asyncrl.controller.cut import ControllerState

MAY_CHANGE = (
    "steps", "lr", "optim_args", "save_every", "keep_last", "stop_after_s", "eval_every", "eval_greedy", "wandb",
    "num_rollout_workers", "rollout_tp", "max_running_requests", "weight_sync", "colocate", "gpu_memory_utilization",
    "replicas", "save_memory", "max_tokens_per_microbatch", "compile", "listen", "join_timeout_s", "swarm_args",
    "timeout_s", "env_timeout_s", "data_path",
)  # fmt: skip
"""Options that a run may go on with changed: how long, what is kept, and where and by whom it is computed."""


# Options


def resumed_config(chosen: dict) -> Config:
    """The config of a run that goes on: its own, with `chosen` options on top, of which one is `resume`.

    Raises ValueError, in one line, if there is no such run, or an option may not change.
    """
    run = Path(chosen["resume"])
    place = {"run_name": run.resolve().name, "runs_dir": str(run.resolve().parent)}
    made = recorded(run)
    begun = Config.from_dict(made["config"])
    brought = found_again(begun, made.get("own", {}).get("digest", ""), run.absolute() / "code")
    own = replace(begun, **place, resume=None, **brought)
    given = {name: value for name, value in chosen.items() if name != "resume"}
    changed = {name: value for name, value in given.items() if value not in (getattr(own, name), getattr(begun, name))}
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


def recorded(run: Path, option: str = "--resume") -> dict:
    """What run.json says of a run. Raises ValueError, in one line, if there is none, or it is of other code."""
    try:
        options = (made := read_header(run))["config"]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{option} {run}: no run is there ({error}); give a run's directory, runs/NAME") from None
    if unknown := options.keys() - {field.name for field in fields(Config)}:
        what = f"made by other code, which had {', '.join(sorted(unknown))}"
        raise ValueError(f"{option} {run}: {what}; use that code, commit {made.get('git_commit')}")
    return made


# Checkpoints


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


def controller_of(checkpoint: Checkpoint, model_path: str, cluster: "Cluster", config: Config) -> "ControllerState":
    """What a leader's controller goes on from, whatever the number of nodes was.

    Raises ValueError if the weights of the model that are not in the checkpoint have changed.
    """
    from asyncrl.controller.cut import ControllerState
    from asyncrl.controller.redistribute import redistribute
    from asyncrl.runlog.batches import weights_sha256
    from asyncrl.runlog.plain import decode

    if checkpoint.frozen_sha256 and checkpoint.frozen_sha256 != weights_sha256(model_path):
        raise ValueError(f"--resume {config.resume}: the weights in {model_path} are not those that it began with")
    parts = [(checkpoint.part / f"node_{node}.msgpack").read_bytes() for node in range(checkpoint.num_nodes)]
    states = [decode(ControllerState, part) for part in parts]
    return redistribute(states, cluster.num_nodes)[cluster.node]
