"""Continues a run (--resume): its options, its newest whole checkpoint, and the state of its controllers.

A folder runs/NAME/checkpoints/step_N has weights for people. Its folder resume/ has shards of the trainer's state, and
versions that publish_delay holds back. There node_K.msgpack has the controller's state of node K, and manifest.json the
digest of every file. A checkpoint appears by one rename. A file that is truncated or changed later is detected.

| a checkpoint has | where | written by | restored by |
|---|---|---|---|
| weights, optimizer, random generators | shards | `training_state` | `restore_training_state` |
| buffer, queue, partial responses | node_K.msgpack | `Controller.snapshot` | `Controller._restore` |
| held-back weights | held_back/ | `held_back_to_save` | `_read_held_back` |
| probe, its scores | manifest, `NodeFacts` | `Probe.state` | `Rank.probe` |
| lengths of the records | manifest, `NodeFacts` | `RunDirectory.record_bytes` | `continue_records` |
| digest of the problems | manifest, `NodeFacts` | `PromptSource.digest` | `check_is_unchanged` compares it |

A resumed run restores in this order: options (command_line.py), checkpoint (start_rank), controller (lead), policy and
then record files (Checkpoints.restore_policy_and_run_folder). Then follow weights that are held back, and the probe
(Rank.probe). The published version (Publisher) and the totals of the step log (StepLog.__enter__) come last.
"""

import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl import extras
from asyncrl.cluster.cluster import Cluster, on_first_rank
from asyncrl.config import (
    OPTIONS,
    ChangeableBy,
    Config,
    RunName,
    options_changeable_by,
    with_new_names,
)
from asyncrl.controller.snapshot import ControllerState
from asyncrl.runlog.header import nearest_run, read_header
from asyncrl.runlog.manifest import (
    Checkpoint,
    find_newest_checkpoint,
    list_checkpoints,
    parse_step,
)
from asyncrl.runlog.plain import decode
from asyncrl.user_code import with_absolute_paths
from asyncrl.weights.models import weights_sha256

# Options


def read_resumed_options(run: Path) -> Config:
    """Return the options of a run's last start, with its present place and its copies of user code.

    Raises ValueError, in one line, if there is no such run.
    """
    name = run.resolve().name
    allowed = RunName.__metadata__[0]
    if not re.fullmatch(allowed.pattern, name):
        raise ValueError(
            f"{run}: the name of a run's folder must be {allowed.title}; rename the folder"
        )
    begun = with_absolute_paths(Config.from_dict(read_checked_header(run)["config"]), run / "code")
    # The folder can have been moved or renamed since run.json was written.
    return replace(begun, run_name=name, runs_dir=str(run.resolve().parent), resume=None)


_FIXED_OPTIONS = [
    option
    for option in OPTIONS.values()
    if ChangeableBy.RESUME not in option.changeable_by and option.name != "resume"
]
"""Options that a resume must not change."""


def keep_fixed_options(config: Config, last_options: Config) -> Config:
    """Return the options of a resumed run, with the fixed ones as `read_resumed_options` spells them.

    `config` has the given options on top of `last_options`. A path can be given as the run is placed now, as in
    `last_options`, or as run.json has it. Raises ValueError, in one line, for any other value of a fixed option.
    """
    recorded_options = Config.from_dict(read_checked_header(Path(config.resume))["config"])
    for option in _FIXED_OPTIONS:
        value, last_value = option.value_in(config), option.value_in(last_options)
        if value not in (last_value, option.value_in(recorded_options)):
            allowed = ", ".join(other.flag for other in options_changeable_by(ChangeableBy.RESUME))
            raise ValueError(
                f"{option.flag} {value} cannot change when a run is resumed: {config.resume} has {last_value}; leave "
                f"it out, or begin a new run. What may change: {allowed}"
            )
    return config.changed({option.name: option.value_in(last_options) for option in _FIXED_OPTIONS})


def read_checked_header(run: Path, option: str = "--resume") -> dict:
    """Return run.json of a run. Raises ValueError, in one line, if it is missing or was written by other code."""
    try:
        header = read_header(run)
        options = msgspec.convert(header["config"], dict)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{option} {run}: no run is there ({error}); give a run's directory, runs/NAME"
            f"{nearest_run(run)}"
        ) from None
    unknown = with_new_names(options).keys() - OPTIONS.keys()
    if unknown:
        what = f"made by other code, which had {', '.join(sorted(unknown))}"
        raise ValueError(
            f"{option} {run}: {what}; use that code, commit {header.get('git_commit')}"
        )
    return header


# Checkpoints


def find_checkpoint(config: Config, cluster: Cluster) -> Checkpoint | None:
    """Return the checkpoint that --resume continues from, or None for a new run; collective. Rank 0 searches for it.

    Raises ValueError on all ranks if no checkpoint is whole.
    """
    if config.resume is None:
        return None
    run = Path(config.resume)
    newest = on_first_rank(lambda: find_newest_checkpoint(run))
    # The path of the run on this node can differ.
    checkpoint = replace(newest, path=run / "checkpoints" / newest.path.name)
    if cluster.is_first:
        for reason in checkpoint.skipped:
            print(f"warning: skipped checkpoint {reason}", flush=True)
    return checkpoint


def exit_if_finished(checkpoint: Checkpoint | None, config: Config, cluster: Cluster) -> None:
    """Report that a resumed run has made all steps, if so, and exit with 0."""
    if checkpoint is None or checkpoint.step < config.steps:
        return
    if cluster.is_first:
        progress = f"{Path(config.resume)} has made {checkpoint.step} steps of {config.steps}"
        print(f"finished already: {progress}; to continue, raise --steps", flush=True)
    sys.exit(0)


def check_is_unchanged(
    checkpoint: Checkpoint, model_path: str, config: Config, problems_digest: str
) -> None:
    """Raise ValueError if a task's problems have changed, or weights of the model that the checkpoint lacks."""
    if checkpoint.nodes[0].problems_digest != problems_digest:
        raise ValueError(
            f"--resume {config.resume}: the rows or problems of {config.data_path or config.task} have changed since "
            "it began; give the old ones (--data-path may name another place), or begin a new run"
        )
    if checkpoint.frozen_sha256 and checkpoint.frozen_sha256 != weights_sha256(model_path):
        raise ValueError(
            f"--resume {config.resume}: the weights in {model_path} have changed since it began"
        )


def load_controller_state(checkpoint: Checkpoint, cluster: Cluster) -> ControllerState:
    """Return the state that a leader's controller continues from, also on another number of nodes."""
    parts = [
        (checkpoint.resume_folder / f"node_{node}.msgpack").read_bytes()
        for node in range(len(checkpoint.nodes))
    ]
    states = [decode(ControllerState, part) for part in parts]
    if len(states) != cluster.num_nodes:
        redistribute = extras.load("--resume on another number of nodes").redistribute
        states = redistribute(states, cluster.num_nodes)
    return states[cluster.node]


def resume_hint(run: Path | None) -> str:
    """Return the command that continues a stopped run, or the reason without one; `run` is None before its start.

    With --save weights, or if nodes share no folder, a run saves only weights (Checkpoints._save_only_weights).
    """
    saved = list_checkpoints(run / "checkpoints") if run else []
    if saved:
        launcher, words = "python", []
        if os.environ.get("TORCHELASTIC_RUN_ID"):
            launcher, num_ranks = "torchrun", os.environ.get("LOCAL_WORLD_SIZE", "1")
            if num_ranks != "1":
                # torchrun starts one rank by default, and after a signal it kills all ranks within 30 s.
                words = ["--nproc-per-node", num_ranks, "--shutdown-timeout", "600"]
        step = parse_step(saved[-1])
        resume = f"--resume {shlex.quote(str(run))}"
        if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            return f"continue from step {step}: the torchrun command of each node, with {resume}"
        program = os.path.relpath(Path(__file__).parents[2] / "train_async.py")
        how = shlex.join([str(Path(sys.executable).with_name(launcher)), *words, program])
        return f"continue from step {step}: {how} {resume}"
    weights = sorted((run / "checkpoints").glob("step_*"), key=parse_step) if run else []
    if weights and parse_step(weights[-1]) >= 0:
        return (
            "only its weights are saved, by --save weights or because nodes share no --runs-dir; begin a new run with "
            f"--model {shlex.quote(str(weights[-1]))}"
        )
    return "nothing is saved yet; --save-every N saves on the way"
