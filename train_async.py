"""Asynchronous RL of a language model: `torchrun train_async.py --algo grpo`.

Rollout runs in separate processes and does not stop for the trainer. A turn of the loop takes a batch of groups, makes
a step on it, and publishes the new weights. Heavy imports are inside functions: --help must answer at once, and every
spawned process imports this file.
"""

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl.cluster.processes import run_job
from asyncrl.cluster.streams import keep_printing
from asyncrl.config import Config
from asyncrl.job.caller import checked_caller
from asyncrl.job.command_line import parse_config

if TYPE_CHECKING:
    from asyncrl.job.node import Follower, Leader


@checked_caller()
def train(config: Config, worker_main: Callable | None = None) -> None:
    """Run the whole job. Every process that torchrun starts calls this.

    Rollout workers run `worker_main(spec, connection)`, by default rollout.run_worker.
    """
    from asyncrl.job.assemble import start_node, start_rank
    from asyncrl.job.step_log import print_time_shares
    from rollout import run_worker

    with start_rank(config) as bare_rank, start_node(bare_rank, worker_main or run_worker) as rank:
        train_on(rank)
    print_time_shares(rank)


def train_on(rank: "Leader | Follower") -> None:
    """Run the loop of a trainer rank. Each call enters its own state of the clock.

    Step s trains at version s - 1 and makes version s. `publish(s)` announces `due_version(s)`, or s after the last
    step. A running evaluation defers the announcement.
    """
    from asyncrl.job.checkpoints import Checkpoints
    from asyncrl.job.publisher import make_publisher
    from asyncrl.job.step_log import StepLog
    from asyncrl.trainer.batch import share_batch
    from asyncrl.trainer.policy import load_policy

    config = rank.config
    policy = load_policy(config, rank.model_path, rank.device, rank.clock)
    checkpoints = Checkpoints(rank, policy)
    checkpoints.restore_policy_and_run_folder()
    checkpoints.allocate_copies()
    publisher = make_publisher(rank, policy)
    publisher.publish(rank.first_version)
    with StepLog(rank) as log, checkpoints:  # from here on a signal lets the step end
        for step in range(rank.first_version + 1, config.steps + 1):
            groups = rank.take_batch(step, publisher)  # checks engines, too
            share = share_batch(groups, step, policy, rank.cluster)  # advantages, too
            with checkpoints.keep_failed_batch(step, groups):
                stats = policy.train_step(share, policy_version=step - 1)
            publisher.publish(step, probe_source=groups)
            log.write(step, groups, stats)
            # Last, because a resume keeps only records and announcements from before it.
            checkpoints.save_if_due(step, publisher)
        publisher.check_last(config.steps)


def main() -> None:
    """Parse and train."""
    # Ctrl-C ends the imports at once and silently: C code may lose a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_printing()
    config = parse_config()
    run_job(lambda: train(config))


if __name__ == "__main__":
    main()
