"""Asynchronous RL of a language model: `torchrun train_async.py --algo grpo`.

The trainer is here; rollout runs in processes of its own and does not stop for it. One turn of the loop takes a batch
of groups that is fresh enough, makes one step on it, and publishes the new weights. Heavy imports are inside functions:
--help answers at once, and every process that is spawned imports this file.
"""

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from config import Config, parse_config
from time_ledger import TrainerClock

if TYPE_CHECKING:
    from node import Node
    from step_log import StepLog


class Interrupted(Exception):
    """A signal asked the run to stop."""


def train(config: Config) -> None:
    """Run the whole job; every process that torchrun starts calls this."""
    from node import start_node
    from step_log import StepLog

    clock = TrainerClock()
    with start_node(config) as node, StepLog(node, clock) as log:
        if node.cluster.trains:
            train_on(node, clock, log)
        else:
            sample_on(node, log)
    log.say_where_time_went()
    node.say_where()


def train_on(node: "Node", clock: TrainerClock, log: "StepLog") -> None:
    """The loop of a trainer rank."""
    import batch
    from policy import load_policy
    from processes import freeze_garbage
    from publisher import Publisher

    config = node.config
    policy = load_policy(config, node.model_path, node.device)
    policy.enter = clock.enter
    node.connect(policy)
    publisher = Publisher(config, policy, node.cluster, node.controller)
    publisher.publish(0, evaluate=config.eval_every > 0)
    clock.enter("other")
    freeze_garbage()
    clock.next_step()
    for step in range(1, config.steps + 1):
        clock.enter("wait")
        groups = node.take_batch(clock.enter)
        if config.record:
            clock.enter("save")
            node.record_batch(step, groups)
        clock.enter("gather")
        share = batch.share(groups, config, node.cluster, policy.module.one_row)
        publisher.choose_probes(groups)
        clock.enter("forward_backward")
        stats = policy.train_step(share, policy_version=step - 1)
        clock.enter("publish")
        publisher.publish(step, evaluate=config.eval_every > 0 and is_due(step, config.eval_every, config.steps))
        clock.enter("other")
        log.write(step, groups, stats, publisher.mismatch, clock.next_step())
        if is_due(step, config.save_every, config.steps):
            clock.enter("save")
            policy.save(node.checkpoint_path(step))


def sample_on(node: "Node", log: "StepLog") -> None:
    """The loop of the leader of a node that only samples: its batches go to nodes that train, weights come back."""
    from exchange import receive_notice, receive_parameters, receive_specs
    from mismatch import Mismatch
    from publisher import stage_and_announce

    specs, mismatch = receive_specs(node.cluster), Mismatch()
    node.connect_workers(specs)
    for step in range(node.config.steps + 1):
        if step:
            node.take_batch()
        notice = receive_notice(node.cluster)
        if notice.probe_logprobs is not None:
            mismatch.note(notice.version, notice.probe_logprobs)
        stage_and_announce(node.controller, notice, receive_parameters(specs, node.cluster))
        if step:
            log.contribute(step, mismatch)


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many steps, and after the last one, is due after `step`."""
    return step == last or (every > 0 and step % every == 0)


def main() -> None:
    """Parse and train."""
    config = parse_config()
    run_job(lambda: train(config))


def run_job(job: Callable[[], None]) -> None:
    """Run a job, and turn every way to end into one line and an exit status: 0 is for a finished job only."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        job()
    except Interrupted as error:
        fail(error.args[0], status=128 + error.args[1])
    except ValueError as error:
        fail(str(error), status=2)
    except (OSError, RuntimeError) as error:
        fail(str(error), status=1)


def _interrupt(number: int, frame) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)  # the way down is not to be interrupted
    raise Interrupted(f"stopped by {signal.Signals(number).name}", number)


def fail(reason: str, status: int) -> None:
    """Print why the run ends, and end it."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
