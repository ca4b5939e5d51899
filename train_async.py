"""Asynchronous RL of a language model: `torchrun train_async.py --algo grpo`.

The trainer is here; rollout runs in processes of its own and does not stop for it. One turn of the loop takes a batch
of groups that is fresh enough, makes one step on it, and publishes the new weights. Heavy imports are inside functions:
--help answers at once, and every process that is spawned imports this file.
"""

import signal
import sys

from config import Config, parse_config
from time_ledger import Account, TrainerClock, describe, seconds


class Interrupted(Exception):
    """A signal asked the run to stop."""


def train(config: Config) -> None:
    """Run the whole job; every trainer rank calls this."""
    import batch
    from node import start_node
    from policy import load_policy
    from publisher import Publisher

    clock = TrainerClock()
    with start_node(config) as node, StepLog(node, clock) as log:
        policy = load_policy(config, node.model_path, node.device)
        policy.enter = clock.enter
        publisher = Publisher(config, policy, node.controller, node.connect(policy))
        publisher.publish(0, evaluate=config.eval_every > 0)
        clock.enter("other")
        clock.next_step()
        for step in range(1, config.steps + 1):
            clock.enter("wait")
            groups = node.take_batch(clock.enter)
            clock.enter("gather")
            share = batch.share(groups, config)
            publisher.choose_probes(groups)
            clock.enter("forward_backward")
            stats = policy.train_step(share, policy_version=step - 1)
            clock.enter("publish")
            publisher.publish(step, evaluate=config.eval_every > 0 and is_due(step, config.eval_every, config.steps))
            clock.enter("other")
            log.write(step, groups, stats, publisher, clock.next_step())
            if is_due(step, config.save_every, config.steps):
                clock.enter("save")
                policy.save(node.checkpoint_path(step))
    log.say_where_time_went()
    node.say_where()


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many steps, and after the last one, is due after `step`."""
    return step == last or (every > 0 and step % every == 0)


class StepLog:
    """Writes a step's metrics, event and sample on rank 0, and does nothing on the others."""

    def __init__(self, node, clock: TrainerClock):
        self.node, self.clock = node, clock
        self.progress = None
        self.tokens_before = 0
        self.step_times: list = []

    def __enter__(self):
        from run_directory import Progress

        if self.node.is_leader:
            self.progress = Progress(self.node.config.steps)
        return self

    def __exit__(self, *_) -> None:
        if self.progress is not None:
            self.progress.close()
            self.clock.next_step()
            self.node.run.record("trainer_time", seconds=seconds(self.clock.total))

    def write(self, step: int, groups, stats: dict[str, float], publisher, account: Account) -> None:
        """Record the step that just ended; after the last one, wait for its evaluation first."""
        if not self.node.is_leader:
            return
        measured = self._measured(is_last=step == self.node.config.steps)
        metrics = self._metrics(step, groups, stats, publisher, account, measured)
        self._advise(step, groups, metrics, measured)
        self.tokens_before = metrics["tokens/generated"]
        self.node.run.log_metrics(metrics)
        self.node.run.record("step", step=step, spans=account.spans_s)
        self._write_sample(step, groups[0].trajectories[0])
        self.progress.show(metrics)

    def _measured(self, is_last: bool) -> dict:
        measured = self.node.controller.drain()
        if is_last:
            self.clock.enter("evaluate")
            self.node.controller.finish_evaluations()
            self.clock.enter("other")
            measured["evaluations"] += self.node.controller.drain()["evaluations"]
        return measured

    def _metrics(self, step: int, groups, stats, publisher, account: Account, measured: dict) -> dict[str, float]:
        from metrics import batch_metrics, evaluation_metrics, rollout_metrics, time_metrics, training_metrics

        times = time_metrics(account.spent, measured["worker_time"])
        return {
            "step": step,
            "policy_version": step,
            "samples": step * self.node.config.groups_per_step * self.node.config.group_size,
            **batch_metrics(groups, step - 1, self.node.config.publish_delay),
            **evaluation_metrics(measured["evaluations"]),
            **rollout_metrics(measured, self.tokens_before, times["time/step_s"]),
            **training_metrics(stats),
            **publisher.mismatch(measured["probes"]),
            **times,
        }

    def _advise(self, step: int, groups, metrics: dict[str, float], measured: dict) -> None:
        """After the first steps, say how rollout and training could be balanced."""
        from advisor import FIRST_STEPS, MIN_STEPS, advise, measure
        from metrics import step_times

        config = self.node.config
        last = min(FIRST_STEPS, config.steps)
        if step > last or last < MIN_STEPS:
            return
        self.step_times.append(step_times(groups, metrics, measured, self.tokens_before))
        if step == last:
            samples = config.groups_per_step * config.group_size
            advice = advise(measure(self.step_times, config.async_ratio, samples, self.node.placement))
            self.node.run.record("advice", text=advice)
            print(advice, flush=True)

    def say_where_time_went(self) -> None:
        """Print, on rank 0, what share of the run trainer and workers spent on what."""
        if self.node.is_leader:
            print(describe("trainer ", self.clock.total))
            for worker, spent in self.node.controller.worker_time().items():
                print(describe(f"worker {worker}", spent))

    def _write_sample(self, step: int, trajectory) -> None:
        decode, start = self.node.tokenizer.decode, int(trajectory.loss_mask.argmax())
        self.node.run.log_sample(
            step=step,
            group=trajectory.group_id,
            prompt=decode(trajectory.tokens[:start]),
            response=decode(trajectory.tokens[start:]),
            turns=trajectory.num_turns,
            reward=trajectory.reward,
            min_version=trajectory.min_version,
        )


def main() -> None:
    """Parse, train, and turn every way to end into one line and an exit status: 0 is for a finished run only."""
    config = parse_config()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        train(config)
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
