"""Writes and prints the results of every step: rank 0 for all nodes, other leaders their own events."""

from asyncrl.cluster.processes import freeze_garbage
from asyncrl.config import GROUP_ADVANTAGES
from asyncrl.controller.failures import Failures
from asyncrl.job.node import Follower, Leader
from asyncrl.records import Group
from asyncrl.runlog.metrics import (
    Max,
    Measured,
    batch_metrics,
    merge,
    merge_nodes,
    time_metrics,
)
from asyncrl.runlog.progress import print_step
from asyncrl.runlog.samples import choose_samples
from asyncrl.runlog.time_ledger import describe, seconds
from asyncrl.weights.stop_tokens import describe_stop_tokens

STEPS_OF_FAILURES = 10
"""Steps between two reports of failures."""
STEPS_WITHOUT_SIGNAL = 3
"""First steps of a run. If every group's rewards were equal in them, the run warns."""

CUT_SHARE = 0.9
"""Smallest share of the first batch's responses at the length limit that makes the run warn."""


class StepLog:
    """Writes a step's metrics and sample of all nodes on rank 0, its event on each leader, no record elsewhere."""

    def __init__(self, rank: Follower | Leader):
        self.rank = rank
        self.clock = rank.clock
        self.last_metrics: dict[str, float] = {}
        """Metrics of the last step, on rank 0; empty before the first one."""
        self.reported = Failures()
        """Failures until the last look at them."""
        self.has_signal = False
        """True if any group so far had unequal rewards. Without them no gradient shows the better response."""

    def __enter__(self) -> "StepLog":
        """End the account of the start: the first step begins. The records of a resumed run are truncated by now."""
        if self.rank.cluster.is_first:
            self.last_metrics = self.rank.run.last_metrics()
            self.has_signal = self.rank.first_version > 0
        if self.rank.cluster.is_leader:
            self.reported = self.rank.controller.failures()
        self.clock.enter("other")
        freeze_garbage()
        self.clock.take()
        return self

    def __exit__(self, *_) -> None:
        if self.rank.cluster.is_leader:
            self.print_failures("in the whole run", self.rank.controller.failures())
        if self.rank.cluster.is_first:
            self.clock.take()
            self.rank.run.record_event("trainer_time", seconds=seconds(self.clock.total))

    def write(self, step: int, groups: list[Group] | None, stats: dict[str, float]) -> None:
        """Record the step that just ended; after the last one, wait for its evaluation first. Collective on leaders."""
        self.clock.enter("other")
        account = self.clock.take()
        config = self.rank.config
        if not self.rank.cluster.is_leader:
            return
        measured = self._measure(step, groups)
        if step % STEPS_OF_FAILURES == 0:
            self.report_failures()
        if step == config.steps:
            self.rank.controller.finish_evaluations()
            self.clock.enter("evaluate")  # also the wait for another node's evaluations
        measured_on_nodes = self.rank.cluster.gather(measured)
        self.clock.enter("other")
        self.rank.run.record_event(
            "step", step=step, spans=account.spans_s, groups=[group.group_id for group in groups]
        )
        if not self.rank.cluster.is_first:
            return
        metrics = {
            "step": step,
            # the version that the step made; `batch_metrics` and `train_step` mean the one before it
            "policy_version": step,
            **merge_nodes(measured_on_nodes),
            **self.rank.controller.take_evaluation(),
            **stats,
            **time_metrics(account.spent),
        }
        metrics["samples"] += self.last_metrics.get("samples", 0)
        metrics |= self.speed_metrics(metrics)
        self.warn_of_equal_rewards(step, metrics)
        self.warn_of_cut_responses(step, metrics)
        self.last_metrics = metrics
        self.rank.run.log_metrics(metrics)
        for plugin in config.plugins:
            plugin.on_step(self.rank.run, metrics)
        decode = self.rank.tokenizer.decode
        answer_of = self.rank.controller.ticket_source.answer
        for sample in choose_samples(step, groups, decode, answer_of, config.log_samples):
            self.rank.run.log_sample(**sample)
        print_step(metrics, config.steps)

    def speed_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the tokens that are sampled per second in a step, and per second and GPU.

        The latter is left out without GPUs, and with --listen, because GPUs of joined hosts are not known.
        """
        num_new = metrics["tokens/generated"] - self.last_metrics.get("tokens/generated", 0)
        speed = {"rollout/tokens_per_s": num_new / metrics["time/step_s"]}
        num_gpus = self.rank.placement.num_gpus * self.rank.cluster.num_nodes
        if num_gpus and self.rank.config.listen is None:
            speed["rollout/tokens_per_s_per_gpu"] = speed["rollout/tokens_per_s"] / num_gpus
        return speed

    def _measure(self, step: int, groups: list[Group]) -> Measured:
        """Return this node's part of the metrics of all nodes."""
        rank = self.rank
        measured = batch_metrics(groups, step - 1, rank.config, rank.cluster.num_nodes)
        worst = merge(
            {name: Max(value) for name, value in metrics.items()}
            for metrics in rank.probe.take_newest()
        )
        return measured | worst | rank.controller.take_metrics()

    def report_failures(self) -> None:
        """Print, on each leader, what failed since the last call, if that is more than a few responses."""
        failures = self.rank.controller.failures()
        newest = failures.since(self.reported)
        self.reported = failures
        if newest.is_reported:
            self.print_failures(f"in the last {STEPS_OF_FAILURES} steps", newest)

    def print_failures(self, when: str, failures: Failures) -> None:
        """Print, on each leader, the failures of its node, if there are any."""
        cluster = self.rank.cluster
        where = f"{cluster.name(cluster.node)}: " if cluster.num_nodes > 1 else ""
        if failures.reasons:
            print(f"warning: {where}{when} {failures}", flush=True)

    def warn_of_equal_rewards(self, step: int, metrics: dict[str, float]) -> None:
        """Warn once if no group of the run's first steps had unequal rewards, and print a hint."""
        config = self.rank.config
        differs = metrics["reward/std"] > 0
        if config.advantage in GROUP_ADVANTAGES:
            differs = metrics["reward/zero_variance_groups"] < 1
        self.has_signal |= differs
        if not self.has_signal and step == min(STEPS_WITHOUT_SIGNAL, config.steps):
            print(
                f"warning: in {step} steps no group had unequal rewards (mean {metrics['reward/mean']:g}): nothing is "
                f"learnt; look at the responses in {self.rank.run.path}/samples.jsonl, and at --task and its reward",
                flush=True,
            )

    def warn_of_cut_responses(self, step: int, metrics: dict[str, float]) -> None:
        """Warn once if hardly a response of the first batch has ended, and print the tokens that end one."""
        config, share = self.rank.config, metrics["response/cut"]
        if step == 1 and share >= CUT_SHARE:
            num_responses = config.groups_per_step * config.group_size
            ends = describe_stop_tokens(self.rank.model_path, self.rank.tokenizer)
            print(
                f"warning: {round(share * num_responses)} of {num_responses} responses of the first batch reached "
                f"--max-response-tokens {config.max_response_tokens}; {ends}; raise that limit, or, if "
                f"{self.rank.run.path}/samples.jsonl shows another end, add it to eos_token_id in the model's "
                "generation_config.json",
                flush=True,
            )


def print_time_shares(rank: Follower | Leader) -> None:
    """Print on each leader the time shares of trainer and workers, and on rank 0 the records' path."""
    if rank.cluster.is_leader:
        print(describe("trainer ", rank.clock.total))
        for worker, spent in rank.controller.journal.worker_time().items():
            print(describe(f"worker {worker}", spent))
    if rank.cluster.is_first:
        print(f"finished: {rank.run.path}", flush=True)
