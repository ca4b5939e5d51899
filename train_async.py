"""Asynchronous RL of a language model: `torchrun train_async.py --algo grpo`.

The trainer is here; rollout runs in processes of its own and does not stop for it. One turn of the loop takes a batch
of groups that is fresh enough, makes one step on it, and publishes the new weights. Heavy imports are inside functions:
--help answers at once, and every process that is spawned imports this file.
"""

import signal
import sys
import time

from config import Config, parse_config


class Interrupted(Exception):
    """A signal asked the run to stop."""


def train(config: Config) -> None:
    """Run the whole job; every trainer rank calls this."""
    import batch
    from node import start_node
    from policy import load_policy
    from publisher import Publisher

    with start_node(config) as node, StepLog(node) as log:
        policy = load_policy(config, node.model_path, node.device)
        publisher = Publisher(config, policy, node.controller, node.connect(policy))
        publisher.publish(0, evaluate=config.eval_every > 0)
        clock = Clock()
        for step in range(1, config.steps + 1):
            clock.lap("log")
            groups = node.take_batch()
            clock.lap("wait")
            share = batch.share(groups, config, policy.module.one_row)
            publisher.choose_probes(groups)
            stats = policy.train_step(share, policy_version=step - 1)
            clock.lap("train")
            publisher.publish(step, evaluate=config.eval_every > 0 and is_due(step, config.eval_every, config.steps))
            clock.lap("publish")
            log.write(step, groups, stats, publisher, clock.next_step())
            if is_due(step, config.save_every, config.steps):
                policy.save(node.checkpoint_path(step))
                clock.lap("save")
    node.say_where()


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many steps, and after the last one, is due after `step`."""
    return step == last or (every > 0 and step % every == 0)


class Clock:
    """Times the phases of each step; what lies between two steps, records and checkpoint, counts for the next one."""

    def __init__(self) -> None:
        self._start = self._last = time.time()
        self._spans: dict[str, tuple[float, float]] = {}

    def lap(self, name: str) -> None:
        """End the phase `name`, which began when the one before it ended."""
        now = time.time()
        self._spans[name], self._last = (self._last, now), now

    def next_step(self) -> dict[str, tuple[float, float]]:
        """The phases of the step that ends here and the `step` itself, as Unix times of start and end."""
        spans = self._spans | {"step": (self._start, self._last)}
        self._start, self._spans = self._last, {}
        return spans


class StepLog:
    """Writes a step's metrics, event and sample on rank 0, and does nothing on the others."""

    def __init__(self, node):
        self.node = node
        self.progress = None
        self.tokens_before = 0

    def __enter__(self):
        from run_directory import Progress

        if self.node.is_leader:
            self.progress = Progress(self.node.config.steps)
        return self

    def __exit__(self, *_) -> None:
        if self.progress is not None:
            self.progress.close()

    def write(self, step: int, groups, stats: dict[str, float], publisher, spans: dict) -> None:
        """Record the step that just ended; after the last one, wait for its evaluation first."""
        if not self.node.is_leader:
            return
        from metrics import batch_metrics, evaluation_metrics, rollout_metrics, training_metrics

        measured = self.node.controller.drain()
        if step == self.node.config.steps:
            self.node.controller.finish_evaluations()
            measured["evaluations"] += self.node.controller.drain()["evaluations"]
        times = {f"time/{name}_s": end - start for name, (start, end) in spans.items()}
        metrics = {
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
        self.tokens_before = metrics["tokens/generated"]
        self.node.run.log_metrics(metrics)
        self.node.run.record("step", step=step, spans=spans)
        self._write_sample(step, groups[0].trajectories[0])
        self.progress.show(metrics)

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
