"""Train again on the batches of a recorded run, without an engine: `python scripts/replay.py RUN --algo tis`.

RUN is the directory of a run made with --record. Every step trains on the very batch that the run's step had, from the
same first weights, by the same policy code; what follows RUN changes options of training. So losses, advantages and
learning rates are compared on identical stale data. `torchrun --nproc-per-node N scripts/replay.py RUN …` uses N ranks.

Staleness and lag are the recorded ones: steps between the recorded policy that sampled a token and the recorded one
that was trained on it. The replayed policy goes another way: drift/* says how far it is from the one that sampled, and
can grow beyond what a run of its own would see, as no sample of its own ever comes back to it.

On the CPU two replays give the same bits, and so does the recorded run itself if options, ranks and threads per rank
are its own. Other ranks or threads add floats in another order; a GPU's kernels may do so from one replay to the next.

It writes a run directory like a run's, beside RUN. Of sampling it has nothing to tell: no rollout/*, ledger/* and
mismatch/*, no samples, and tokens/generated is 0; time/wait_s is what reading a batch takes. With --evaluate a
rollout worker comes up beside the training and samples the held-out problems with the last weights, as the run does;
that is in the last line of metrics.jsonl.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.config import OPTIONS, Config, May, Option, options_for
from asyncrl.job.command_line import read_options
from asyncrl.job.resume import recorded
from asyncrl.runlog.batches import batch_path, read_batch, weights_sha256
from asyncrl.runlog.time_ledger import Account
from asyncrl.user_code import title
from rollout import run_worker
from train_async import run_job


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
        header = recorded(path, "replay")
        if "weights_sha256" not in header:
            raise ValueError(
                f"{path} was not recorded; only a run of train_async.py --record can be replayed"
            )
        first = header.get("first_step", 1)
        num_steps = first - 1 + len(list((path / "batches").glob("step_*.msgpack")))
        for batch in (batch_path(path, step) for step in range(first, max(first, num_steps) + 1)):
            if not batch.exists():
                raise ValueError(
                    f"{batch} is missing: a replay needs every batch from the first on"
                )
        return cls(
            path, Config.from_dict(header["config"]), header["weights_sha256"], num_steps, first
        )

    def check_weights(self, model: str, model_path: str) -> None:
        """Raise ValueError if the folder's weights are not those that the run began with."""
        found = weights_sha256(model_path)
        if found != self.weights_sha256:
            raise ValueError(
                f"--model {model} has weights {found[:12]}…, and {self.path} began with {self.weights_sha256[:12]}…: "
                "its batches are another policy's; give --model the folder with the weights of the run"
            )


def own_options(recording: Recording) -> Config:
    """Return the recorded run's options, with defaults for its records and devices."""
    recorded = recording.config
    return replace(
        recorded,
        **{option.path: option.default for option in options_for(May.NOT_COPIED)},
        steps=min(recorded.steps, recording.num_steps),
        runs_dir=str(recording.path.parent),
        # with 0 there would be no held-out problems
        eval_every=recorded.eval_every or recorded.steps,
    )


def choose_options(recording: Recording, arguments: list[str], evaluate: bool) -> Config:
    """Return the recorded run's options, changed by `arguments`.

    Raises ValueError for one that a replay cannot change, for more steps than were recorded, and for what
    train_async.py would refuse.
    """
    own = own_options(recording)
    chosen = read_options(arguments, own)
    for option in OPTIONS.values():
        if option.value_in(chosen) != option.value_in(own):
            _check_may_change(option, option.value_in(recording.config), evaluate)
    if chosen.steps > recording.num_steps:
        raise ValueError(
            f"--steps {chosen.steps}: {recording.path} has batches of {recording.num_steps} steps"
        )
    name = f"{recording.path.name}-replay-{title(chosen.algo)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return replace(chosen, run_name=chosen.run_name or name).checked()


def _check_may_change(option: Option, recorded, evaluate: bool) -> None:
    """Raise ValueError unless a replay may change an option; one of sampling is part of the data."""
    if May.REPLAY in option.may or (evaluate and May.EVALUATION in option.may):
        return
    if May.EVALUATION in option.may:
        raise ValueError(
            f"{option.flag} means nothing without --evaluate: a replay samples nothing"
        )
    may_change = ", ".join(other.flag for other in options_for(May.REPLAY))
    made = f"the batches were made with {option.name} = {recorded}"
    raise ValueError(f"{option.flag} cannot be changed: {made}. A replay may change {may_change}")


def replay(recording: Recording, config: Config, evaluate: bool) -> None:
    """Run the whole replay; every trainer rank calls this."""
    from asyncrl.job.node import start_node
    from asyncrl.runlog.progress import Progress
    from asyncrl.trainer.policy import load_policy

    with start_node(config, run_worker, lambda start: lead(start, recording, evaluate)) as node:
        policy = load_policy(config, node.model_path, node.device, node.clock)
        progress = Progress(config.steps) if node.cluster.is_leader else None
        try:
            train(recording, node, policy, progress, evaluate)
        finally:
            if progress is not None:
                progress.close()
    node.say_where()


def lead(start, recording: Recording, evaluate: bool):
    """Make rank 0's node: the model must be the recorded one; a rollout worker is needed only to evaluate."""
    from asyncrl.cluster.gpus import visible_gpus
    from asyncrl.job.node import start_rollout
    from asyncrl.runlog.run_directory import RunDirectory
    from asyncrl.weights.models import resolve_model

    if start.cluster.num_nodes > 1:
        raise ValueError(
            f"a replay runs on one node, got {start.cluster.num_nodes}; use --nnodes 1"
        )
    model_path = resolve_model(start.config.model, start.config.task)
    recording.check_weights(start.config.model, model_path)
    if evaluate:
        node = start_rollout(start)
    else:
        run = RunDirectory(start.config, gpus=[gpu.name for gpu in visible_gpus()])
        node = replace(start, config=run.config).make_node(model_path, run=run)
        start.on_end.callback(lambda: node.run.close(sys.exception()))
        print(f"run directory: {node.run.path}", flush=True)
    node.run.record("replay", of=str(recording.path), weights_sha256=recording.weights_sha256)
    return node


def train(recording: Recording, node, policy, progress, evaluate: bool) -> None:
    """Make every step on its recorded batch, as train_async.train does on what rollout gives it; collective."""
    from asyncrl.job.node import is_due
    from asyncrl.trainer import batch

    config, clock = node.config, node.clock
    clock.enter("other")
    clock.take()
    for step in range(recording.first_step, config.steps + 1):
        clock.enter("wait")
        groups = (
            read_batch(batch_path(recording.path, step), step) if node.cluster.is_leader else None
        )
        updates = batch.deal(groups, step, policy, node.cluster)
        stats = policy.train_step(updates, policy_version=step - 1)
        clock.enter("evaluate")
        evaluated = evaluate_last(node, policy) if evaluate and step == config.steps else {}
        clock.enter("other")
        if node.cluster.is_leader:
            write_metrics(node, step, groups, stats, evaluated, clock.take(), progress)
        if is_due(step, config.save_every, config.steps):
            clock.enter("save")
            policy.save(str(node.run.checkpoint_path(step)) if node.cluster.is_first else "")


def evaluate_last(node, policy) -> dict[str, float]:
    """Publish the last weights and sample the held-out problems with them; collective. Nothing but on rank 0.

    Seeds of sampling follow from version and problem, so a replay and its run are sampled alike. Training prompts
    start behind the held-out ones, as in a run; nobody takes them.
    """
    from asyncrl.job.publisher import Publisher

    Publisher(node, policy).publish(node.config.steps)
    if not node.cluster.is_leader:
        return {}
    node.controller.finish_evaluations()
    return node.controller.take_evaluation()


def write_metrics(
    node, step: int, groups, stats: dict[str, float], evaluated: dict, account: Account, progress
) -> None:
    """Record a step on rank 0, under the names that a run uses."""
    from asyncrl.runlog.metrics import batch_metrics, over_nodes, time_metrics, training_metrics

    config = node.config
    metrics = {
        "step": step,
        "policy_version": step,
        "samples": step * config.groups_per_step * config.group_size,
        **over_nodes([batch_metrics(groups, step - 1, config)]),
        **evaluated,
        "tokens/generated": 0,
        **training_metrics(stats),
        **time_metrics(account.spent),
    }
    node.run.record("step", step=step, spans=account.spans_s)
    node.run.log_metrics(metrics)
    progress.show(metrics)


def main() -> None:
    """Read the command line and replay."""
    parser = argparse.ArgumentParser(
        usage="replay.py RUN [--evaluate] [options of training, as of train_async.py]",
        description=__doc__.splitlines()[0],
        epilog="options of training: "
        + ", ".join(option.flag for option in options_for(May.REPLAY)),
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="directory of a run made with --record"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="sample the held-out problems with the last weights"
    )
    arguments, options = parser.parse_known_args()

    def job() -> None:
        recording = Recording.open(arguments.run)
        replay(
            recording, choose_options(recording, options, arguments.evaluate), arguments.evaluate
        )

    run_job(job)


if __name__ == "__main__":
    main()
