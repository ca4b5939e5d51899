"""Train again on the batches of a recorded run, without an engine: `python scripts/replay.py RUN --algo tis`.

RUN is the directory of a run made with --record. Every step trains on the very batch of the run's step, by the same
policy code. The first weights are the same. Options behind RUN change those of training. So losses, advantages and
learning rates are compared on identical stale data. `torchrun --nproc-per-node N scripts/replay.py RUN …` uses N ranks.

Staleness and lag are the recorded ones. They are steps from the recorded policy that sampled a token to the recorded
policy that was trained on it. The replayed policy goes another way. drift/* is its distance from the policy that
sampled. It can grow beyond that of a real run, because the replayed policy never samples.

On the CPU two replays give the same bits. The recorded run gives them, too, if options, ranks and threads per rank are
equal. Other ranks or threads add floats in another order. A GPU's kernels can do so from one replay to the next.

It writes a run directory like a run's, beside RUN. It lacks samples, rollout/*, ledger/* and mismatch/*, because it
does not sample. tokens/generated is 0, and time/wait_s is the time to read a batch. To sample the held-out problems
with its last weights, give scripts/evaluate.py this directory.
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from asyncrl.cluster.processes import run_job
from asyncrl.cluster.streams import keep_printing
from asyncrl.config import (
    OPTIONS,
    ChangeableBy,
    Config,
    Option,
    options_changeable_by,
    with_home_folder,
)
from asyncrl.job.command_line import read_options
from asyncrl.job.resume import read_checked_header
from asyncrl.runlog.time_ledger import Account
from asyncrl.user_code import run_name_part
from asyncrl.weights.models import weights_sha256
from extras.recording import batch_path, read_batch


@dataclass(frozen=True)
class Recording:
    """A run made with --record, as it lies on disk."""

    path: Path
    config: Config
    """The run's own options."""
    weights_sha256: str
    """Fingerprint of the weights that it began with."""
    num_steps: int
    """Last step whose batch is there; below config.steps if the run was interrupted."""
    first_step: int = 1
    """Above 1 where only the step is there that ended a run, with the weights before it."""

    @classmethod
    def open(cls, path: Path) -> "Recording":
        """Look at a run directory. Raises ValueError, in one line, if it holds no run that can be replayed."""
        header = read_checked_header(path, "replay")
        if "weights_sha256" not in header:
            raise ValueError(
                f"{path} was not recorded; only a run of train_async.py --record can be replayed"
            )
        first = header.get("first_step", 1)
        num_steps = first - 1 + len(list((path / "batches").glob("step_*.msgpack")))
        if num_steps < first:
            raise ValueError(f"{path} has no batch, so there is nothing to replay")
        return cls(
            path, Config.from_dict(header["config"]), header["weights_sha256"], num_steps, first
        )

    def check_weights(self, model: str, model_path: str) -> None:
        """Raise ValueError if the folder's weights differ from the first weights of the run."""
        found = weights_sha256(model_path)
        if found != self.weights_sha256:
            raise ValueError(
                f"--model {model} has weights {found[:12]}…, and {self.path} began with {self.weights_sha256[:12]}…: "
                "its batches are another policy's; give --model the folder with the weights of the run"
            )


def choose_options(recording: Recording, arguments: list[str]) -> Config:
    """Return the recorded run's options, with defaults for records and devices, changed by `arguments`.

    Raises ValueError for an option that a replay cannot change, and for more steps than were recorded. It also raises
    ValueError for options that train_async.py would refuse.
    """
    run = recording.config
    own = replace(
        run,
        **{
            option.path: option.default for option in options_changeable_by(ChangeableBy.NOT_COPIED)
        },
        steps=min(run.steps, recording.num_steps),
        runs_dir=str(recording.path.parent),
    )
    config = read_options(arguments, own)
    for option in OPTIONS.values():
        if option.value_in(config) != option.value_in(own):
            _check_may_change(option, option.value_in(run))
    if config.steps > recording.num_steps:
        raise ValueError(
            f"--steps {config.steps}: {recording.path} has batches of {recording.num_steps} steps"
        )
    name = f"{recording.path.name}-replay-{run_name_part(config.algo)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return replace(config, run_name=config.run_name or name).checked()


def _check_may_change(option: Option, recorded) -> None:
    """Raise ValueError unless a replay may change an option; one of sampling is part of the data."""
    if ChangeableBy.REPLAY in option.changeable_by:
        return
    may_change = ", ".join(other.flag for other in options_changeable_by(ChangeableBy.REPLAY))
    reason = f"the batches were made with {option.name} = {recorded}"
    raise ValueError(f"{option.flag} cannot be changed: {reason}. A replay may change {may_change}")


def replay(recording: Recording, config: Config) -> None:
    """Run the whole replay; every trainer rank calls this."""
    from asyncrl.cluster.stacks import write_stacks_to
    from asyncrl.job.assemble import follow, open_records, start_rank
    from asyncrl.trainer.optimizer import choose_lr
    from asyncrl.trainer.policy import load_policy
    from asyncrl.weights.models import num_parameters, resolve_model

    with start_rank(config) as bare_rank:
        if bare_rank.cluster.num_nodes > 1:
            raise ValueError(
                f"a replay runs on one node, got {bare_rank.cluster.num_nodes}; use --nnodes 1"
            )
        model_path = resolve_model(config.model, config.task)
        config, _ = choose_lr(config, num_parameters(model_path))
        run = None
        if bare_rank.cluster.is_leader:
            recording.check_weights(config.model, model_path)
            run = open_records(bare_rank, config)
        shared = bare_rank.cluster.broadcast_on_node(run and (run.config, run.path / "stacks.txt"))
        run_config, stacks_path = shared
        write_stacks_to(stacks_path)
        bare_rank.use_device()
        rank = follow(bare_rank, run_config, model_path)
        policy = load_policy(rank.config, model_path, rank.device, rank.clock)
        train(recording, rank, policy, run)
    if run is not None:
        print(f"finished: {run.path}", flush=True)


def train(recording: Recording, rank, policy, run) -> None:
    """Make every step on its recorded batch, as train_async.train does on what rollout gives it; collective.

    The leader has the records of the replay, `run`; other ranks have None.
    """
    from asyncrl.runlog.progress import print_step
    from asyncrl.trainer.batch import share_batch
    from asyncrl.trainer.weight_files import save_weights

    config, clock = rank.config, rank.clock
    num_samples = (recording.first_step - 1) * config.groups_per_step * config.group_size
    if run is not None:
        run.record_event("replay", of=str(recording.path), weights_sha256=recording.weights_sha256)
    clock.enter("other")
    clock.take()
    for step in range(recording.first_step, config.steps + 1):
        clock.enter("wait")
        groups = read_batch(batch_path(recording.path, step), step) if run else None
        share = share_batch(groups, step, policy, rank.cluster)
        stats = policy.train_step(share, policy_version=step - 1)
        num_samples += stats["samples"]
        clock.enter("other")
        if run is not None:
            account = clock.take()
            metrics = metrics_of(config, step, groups, stats, account)
            metrics["samples"] = num_samples
            run.record_event("step", step=step, spans=account.spans_s)
            run.log_metrics(metrics)
            print_step(metrics, config.steps)
        if config.is_due(step, config.save_every):
            clock.enter("save")
            save_weights(policy, str(run.path / "checkpoints" / f"step_{step}") if run else "")


def metrics_of(
    config: Config, step: int, groups, stats: dict[str, float], account: Account
) -> dict[str, float]:
    """Return the metrics of a step, under the names that a run uses."""
    from asyncrl.runlog.metrics import batch_metrics, merge_nodes, time_metrics

    return {
        "step": step,
        "policy_version": step,
        **merge_nodes([batch_metrics(groups, step - 1, config)]),
        "tokens/generated": 0,
        **stats,
        **time_metrics(account.spent),
    }


@dataclass(frozen=True)
class Arguments:
    """The command line, but for options of training, as of train_async.py."""

    run: tyro.conf.Positional[Path]
    """Directory of a run made with --record."""


def main() -> None:
    """Read the command line and replay."""
    keep_printing()
    given, options = tyro.cli(
        Arguments,
        args=with_home_folder(sys.argv[1:]),
        description=__doc__,
        return_unknown_args=True,
    )

    def job() -> None:
        recording = Recording.open(given.run)
        replay(recording, choose_options(recording, options))

    run_job(job)


if __name__ == "__main__":
    main()
