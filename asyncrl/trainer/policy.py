"""The policy: the loss of packed tokens and its optimizer updates.

All ranks must call a method marked «collective». Their numbers of micro-batches may differ.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from algos import KL_ESTIMATORS, LossInputs
from algos.centering import centering_term
from algos.inputs import couples_tokens, gathered
from algos.proximal import loglinear
from asyncrl.config import Config
from asyncrl.plugins import last_given
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.trainer.aggregation import UpdateTotals, token_weights
from asyncrl.trainer.attention import attention_inputs
from asyncrl.trainer.gae import estimate_step
from asyncrl.trainer.lag_stats import TokenStats, staleness_metrics
from asyncrl.trainer.logprobs import TokenLogprobs, TokenScores
from asyncrl.trainer.lora import without_adapters
from asyncrl.trainer.loss_choice import choose_loss
from asyncrl.trainer.model import WholeWeights, load_model, trained_names
from asyncrl.trainer.optimizer import (
    OptimizerState,
    learning_rate,
    make_optimizer,
    parameter_groups,
    step_and_count_changes,
)
from asyncrl.trainer.packing import (
    Bundle,
    MicroBatch,
    RankShare,
    TrainSequence,
    pack,
    with_equal_counts,
)
from asyncrl.trainer.sampling import Sampling
from asyncrl.trainer.sharding import (
    free_gathered_weights,
    gather,
    set_exchange,
    trainer_mesh,
)
from asyncrl.trainer.splitting import split_evenly


class NotFinite(RuntimeError):
    """A loss or a gradient is infinite or NaN. All ranks raise it together, before the update changes a weight.

    Earlier updates of the step are made."""


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the metrics of a GPU's memory; empty on a CPU."""
    if device.type == "cpu":
        return {}
    return {
        "memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "memory/reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "memory/free_gib": torch.cuda.mem_get_info()[0] / 2**30,
        "memory/retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


@dataclass(eq=False)
class Policy(WholeWeights):
    """The model, its optimizer and the loss; every rank holds its shard."""

    config: Config
    model_path: str
    module: TokenLogprobs
    reference: TokenLogprobs | None
    loss: Callable
    device: torch.device
    clock: TimeLedger
    num_updates: int = 0

    def __post_init__(self) -> None:
        groups = parameter_groups(self.config, self.module.model, self.module.value_head)
        self._clipped = [group["params"] for group in groups]
        self.optimizer = make_optimizer(self.config, groups)
        self._lr_scales = [group["lr"] / self.config.lr for group in self.optimizer.param_groups]
        self.optimizer_state = OptimizerState(self.optimizer, trained_names(self.module))
        plugins = [plugin.make_policy_plugin(self) for plugin in self.config.plugins]
        self.plugins = [plugin for plugin in plugins if plugin is not None]

    def split_over_ranks(
        self, sequences: list[TrainSequence], num_ranks: int
    ) -> list[list[Bundle]]:
        """Split the sequences of a minibatch over ranks: [rank] → bundles, about equal tokens each."""
        splits = (plugin.split_over_ranks(sequences, num_ranks) for plugin in self.plugins)
        return last_given(splits, None) or split_evenly(sequences, num_ranks)

    def train_step(self, share: RankShare, policy_version: int) -> dict[str, float]:
        """Make a step's optimizer updates on this rank's share, [minibatch][micro-batch] → bundles; collective.

        `policy_version` is the version of the weights now. Each epoch makes an update of each minibatch; after the
        first epoch, seed, version and epoch draw their order. Proximal log-probs and values are by the weights before
        the first update.

        Returns metrics by their names in the log, equal on all ranks but for this rank's memory. `loss/total`,
        `grad_norm` (before clipping) and `changed_weights` are means over the updates. `changed_weights` is the share
        of weights that an update changes in bfloat16. `loss/lr` is that of the last update. The rest is from
        staleness_metrics, TokenStats, the plugins and estimate_step (with a value head).
        Raises NotFinite for a non-finite loss or gradient. Raises RuntimeError for an update without a trained token,
        and for a token of a newer version than `policy_version`.
        """
        self.clock.enter("forward_backward")
        order = self._order(len(share), policy_version)
        metrics = staleness_metrics(share, policy_version)
        has_proximal = len(order) > 1 and self.config.proximal == "recompute"
        microbatches = [
            [
                self._with_initial_scores(self.pack_to_train(bundles, policy_version), has_proximal)
                for bundles in minibatch
            ]
            for minibatch in with_equal_counts(share)
        ]
        if self.module.value_head is not None:
            microbatches, value_metrics = estimate_step(microbatches, self.config.advantage_options)
            metrics |= value_metrics
        stats = TokenStats()
        results = [
            self._make_update(microbatches[index], policy_version, num_made / len(order), stats)
            for num_made, index in enumerate(order)
        ]
        for name in results[0]:
            metrics[name] = sum(result[name] for result in results) / len(results)
        metrics["loss/lr"] = results[-1]["loss/lr"]
        metrics |= stats.reduce()
        for plugin in self.plugins:
            metrics |= plugin.metrics()
        return metrics | memory_metrics(self.device)

    def _order(self, num_minibatches: int, policy_version: int) -> list[int]:
        """Return which minibatch each update of a step trains on."""
        order = list(range(num_minibatches))
        for epoch in range(1, self.config.optim.epochs):
            generator = np.random.default_rng((self.config.seed, policy_version, epoch))
            order += generator.permutation(num_minibatches).tolist()
        return order

    @torch.no_grad()
    def _with_initial_scores(self, microbatch: MicroBatch, has_proximal: bool) -> MicroBatch:
        """Add the columns of scores by the weights before the first update that the step needs; collective."""
        has_values = self.module.value_head is not None
        if not has_proximal and not has_values:
            return microbatch
        scores = self.forward(self.module, microbatch)
        columns = dict(microbatch.columns)
        if has_values:
            columns["values"] = scores.values
        if has_proximal:
            columns["proximal_logprobs"] = scores.logprobs
        return replace(microbatch, columns=columns)

    @torch.no_grad()
    def logprobs_of(
        self, microbatches: list[list[TrainSequence]], raw: bool = False
    ) -> list[Tensor]:
        """Return the log-probs of each micro-batch's trained tokens, flat [N] float32 nats on the CPU; collective.

        The tokens keep the order of the sequences. `raw` leaves the sampling transform out.
        """
        (padded,) = with_equal_counts([microbatches])
        packed = [pack(sequences, self.module.layout).to(self.device) for sequences in padded]
        logprobs = [
            self.forward(self.module, microbatch, raw).logprobs.cpu() for microbatch in packed
        ]
        free_gathered_weights(
            self.module
        )  # FSDP keeps them for a backward pass, but there is no such pass
        return logprobs[: len(microbatches)]

    def pack_to_train(self, bundles: list[Bundle], policy_version: int) -> MicroBatch:
        """Pack bundles to train on. Raises RuntimeError for a token of a newer version than the trainer's."""
        microbatch = pack(bundles, self.module.layout, policy_version)
        newest = max(microbatch.columns["policy_versions"].tolist(), default=policy_version)
        if newest > policy_version:
            raise RuntimeError(
                f"a token was sampled by version {newest}, but the trainer is at version {policy_version}: "
                "versions are stamped or published wrongly"
            )
        for plugin in self.plugins:
            microbatch = plugin.extend_batch(microbatch, bundles)
        return microbatch.to(self.device)

    def forward(
        self, module: TokenLogprobs, microbatch: MicroBatch, raw: bool = False
    ) -> TokenScores:
        """Score the trained tokens of a micro-batch; `raw` leaves the sampling transform out.

        Each plugin wraps the call: last plugin → … → first plugin → `score` → `TokenLogprobs.forward`.
        """
        config = self.config
        sampling = Sampling(config.temperature, config.top_p, config.top_k, config.min_p)
        sampling = Sampling() if raw else sampling
        # Only a pass with gradient uses the likeliest tokens.
        reads_top = config.centering and torch.is_grad_enabled()

        def score(
            module: TokenLogprobs, microbatch: MicroBatch, attention_kwargs: dict | None
        ) -> TokenScores:
            if attention_kwargs is None:
                attention_kwargs = attention_inputs(module.attention, microbatch)
            return module(
                microbatch.input_ids,
                microbatch.position_ids,
                microbatch.sources,
                microbatch.targets,
                sampling,
                attention_kwargs,
                microbatch.columns.get("top_ids") if reads_top else None,
            )

        for plugin in self.plugins:
            score = functools.partial(plugin.forward, score)
        return score(module, microbatch, attention_kwargs=None)  # None: the micro-batch's

    def _make_update(
        self,
        microbatches: list[MicroBatch],
        policy_version: int,
        progress: float,
        stats: TokenStats,
    ) -> dict[str, float]:
        """Make one optimizer update of a step; return its loss, gradient norm, learning rate and changed weights.

        `policy_version` is the version before the step. `progress`, in [0, 1), is the share of its updates made so far.
        """
        totals = self._totals(microbatches)
        if not totals.tokens:
            raise RuntimeError(
                "an update got no trained token on any rank: every loss mask is empty"
            )
        all_tokens = self._all_tokens(microbatches, progress) if couples_tokens(self.loss) else None
        total_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        num_added_before = len(stats.sequence_log_ratios)
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            set_exchange(self.module, self.config.save_memory, is_last)
            per_token_loss = self._per_token_loss(microbatch, progress, all_tokens, stats)
            weights = token_weights(microbatch.trained_in_trajectory, totals, self.config)
            summed = (per_token_loss * weights).sum()
            for plugin in self.plugins:
                summed = summed + plugin.extra_loss(microbatch, totals.sequences)
            # The token weights are global already, so undo FSDP's average over ranks.
            (summed * dist.get_world_size()).backward()
            total_loss += summed.detach()
        ess = stats.sequence_ess(num_added_before) if self.config.optim.scale_lr_by_ess else 1.0
        lr = learning_rate(self.config, self.num_updates, policy_version + progress, ess)
        return self._step(float(self.sum_over_ranks(total_loss)), lr)

    def _totals(self, microbatches: list[MicroBatch]) -> UpdateTotals:
        """Count the trained tokens, sequences and trajectories of an update, on all ranks; collective."""
        counts = [
            (len(microbatch.targets), microbatch.num_sequences, microbatch.num_trajectories)
            for microbatch in microbatches
        ]
        totals = torch.tensor(counts, dtype=torch.float64).sum(0)
        return UpdateTotals(*self.sum_over_ranks(totals).tolist())

    def _per_token_loss(
        self,
        microbatch: MicroBatch,
        progress: float,
        all_tokens: LossInputs | None,
        stats: TokenStats,
    ) -> Tensor:
        """Return the loss [N] of each trained token with its penalties, and add its statistics to `stats`."""
        ref_logprobs = self._reference_logprobs(microbatch)
        scores = self.forward(self.module, microbatch)
        if not len(microbatch.targets):
            # Shape [0], but in the graph: FSDP's backward collectives must still run on this rank.
            return scores.logprobs + scores.values
        inputs = _loss_inputs(microbatch, scores.logprobs, progress)
        loss, loss_stats = (
            self.loss(inputs) if all_tokens is None else self.loss(inputs, all_tokens)
        )
        if self.config.centering:
            term, term_stats = centering_term(
                self.loss, inputs, scores.top_logprobs, microbatch.columns["top_logprobs"]
            )
            loss, loss_stats = loss + term, loss_stats | term_stats
        token_stats = {f"loss/{name}": column for name, column in loss_stats.items()}
        if ref_logprobs is not None:
            estimator = KL_ESTIMATORS[self.config.kl_estimator]
            kl = estimator(scores.logprobs, ref_logprobs, microbatch.columns["behavior_logprobs"])
            token_stats["loss/kl_ref"] = kl.detach()
            loss = loss + self.config.kl_coef * kl
        if self.config.optim.entropy_coef:
            loss = loss - self.config.optim.entropy_coef * scores.entropy
        if "returns" in microbatch.columns:
            errors = (scores.values - microbatch.columns["returns"]) ** 2 / 2
            token_stats["value/loss"] = errors.detach()
            loss = loss + self.config.advantage_options.value_coef * errors
        stats.add_scores(microbatch, scores, token_stats)
        return loss

    @torch.no_grad()
    def _reference_logprobs(self, microbatch: MicroBatch) -> Tensor | None:
        """Return the log-probs [N] of the frozen reference, nats; None without a KL term."""
        if self.reference is None:
            return None
        with without_adapters(self.reference):
            return self.forward(self.reference, microbatch).logprobs

    @torch.no_grad()
    def _all_tokens(self, microbatches: list[MicroBatch], progress: float) -> LossInputs:
        """Return the inputs of all trained tokens of an update, on all ranks; collective."""
        return gathered(
            [
                _loss_inputs(batch, self.forward(self.module, batch).logprobs, progress)
                for batch in microbatches
            ]
        )

    def _step(self, loss: float, lr: float) -> dict[str, float]:
        """Clip the gradient and step the optimizer. Raises NotFinite before this update changes a weight."""
        # The caller read `loss`, so the device has finished and the clock is right.
        self.clock.enter("optimizer")
        for plugin in self.plugins:
            plugin.after_backward()
        # One norm a group: the value head's large first gradients must not scale down the model's.
        norms = [
            nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
            for parameters in self._clipped
        ]
        grad_norm, *head_norms = [float(gather(norm)) for norm in norms]
        is_finite = all(map(math.isfinite, [loss, grad_norm, *head_norms]))
        changed_weights = 0.0
        if any([plugin.skips_update(loss, is_finite) for plugin in self.plugins]):
            grad_norm = 0.0
        elif is_finite:
            changed_weights = self._change_weights(lr)
        else:
            raise NotFinite(
                f"loss {loss} and gradient norm {grad_norm} at update {self.num_updates} must be finite: "
                "look at the rewards, the behavior log-probs and the learning rate"
            )
        self.optimizer.zero_grad()
        self.clock.enter("forward_backward")
        return {
            "loss/total": loss,
            "loss/grad_norm": grad_norm,
            "loss/lr": lr,
            "loss/changed_weights": changed_weights,
        }

    def _change_weights(self, lr: float) -> float:
        """Step the optimizer. Return the share of weights that change in bfloat16; collective."""
        for group, scale in zip(self.optimizer.param_groups, self._lr_scales, strict=True):
            group["lr"] = lr * scale
        counts = step_and_count_changes(self.optimizer, self._clipped[0])
        self.num_updates += 1
        # Reading the sums waits for the device, too.
        num_changed, num_unchanged = self.sum_over_ranks(counts).tolist()
        return num_changed / (num_changed + num_unchanged)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sums of values over all ranks, on the policy's device; collective."""
        values = values.to(self.device)
        dist.all_reduce(values)
        return values


def _loss_inputs(microbatch: MicroBatch, logprobs: Tensor, progress: float) -> LossInputs:
    """Return the inputs of a loss: a micro-batch, current log-probs [N], and the share of the step's updates made."""
    behavior_logprobs = microbatch.columns["behavior_logprobs"]
    proximal_logprobs = microbatch.columns.get("proximal_logprobs")
    if proximal_logprobs is None:
        # This is exact before a step's first update: the proximal policy is the current one. Later it is approximate
        # (algos/proximal.py).
        proximal_logprobs = loglinear(logprobs, behavior_logprobs, microbatch.lags, progress)
    return LossInputs(
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        proximal_logprobs=proximal_logprobs,
        advantages=microbatch.advantages,
        rewards=microbatch.rewards,
        sequence_ids=microbatch.sequence_ids,
        lags=microbatch.lags,
        columns=microbatch.columns,
    )


def load_policy(
    config: Config,
    model_path: str,
    device: torch.device,
    clock: TimeLedger | None = None,
) -> Policy:
    """Load a model's folder on `device`, sharded over all ranks of the process group; collective.

    With kl_coef > 0 a frozen copy is the reference; with LoRA it is the model without its adapters.
    Raises ValueError for a missing or unfit model, and for an argument that the loss does not take.
    """
    loss = choose_loss(config)
    mesh = trainer_mesh(config.replicas, device)
    module = load_model(config, model_path, mesh, device)
    reference = module if config.kl_coef > 0 else None
    if reference is not None and not config.lora_rank:
        reference = load_model(config, model_path, mesh, device, is_trained=False)
    return Policy(config, model_path, module, reference, loss, device, clock or TimeLedger())
