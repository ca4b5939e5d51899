"""The policy of --share-prefix: sequences of an update that begin alike are read once."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedConfig

from asyncrl.config import Config
from asyncrl.plugins import PolicyPlugin
from asyncrl.trainer.attention import print_on_rank_0
from asyncrl.trainer.logprobs import TokenLogprobs, TokenScores
from asyncrl.trainer.packing import Bundle, MicroBatch, TrainSequence
from asyncrl.trainer.policy import Policy
from extras.trees.attention import attention_mask, dense_cost, unfit_for_sharing
from extras.trees.tree import choose_bundles, count_tokens


def reason_against(config: Config, model: PreTrainedConfig, device: torch.device) -> str | None:
    """Return why `--share-prefix auto` shares no prefix in a run; None if it may."""
    if device.type != "cpu":
        return "it was timed on CPUs only; try prompt or tree"
    if config.router_replay:
        return "--router-replay has the experts of each response"
    if config.optim.seq_aux_loss_coef:
        return "--optim.seq-aux-loss-coef balances experts within a sequence"
    unfit = unfit_for_sharing(model)
    return f"the model has {', '.join(unfit)}" if unfit else None


class Sharing(PolicyPlugin):
    """Reads once what several sequences of an update begin with."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._share_prefix = policy.config.share_prefix
        reason = reason_against(policy.config, policy.module.model.config, policy.device)
        if self._share_prefix == "auto" and reason:
            self._share_prefix = "off"
            print_on_rank_0(f"--share-prefix auto is off: {reason}")
        self.attention_of_trees = policy.module.attention
        """That of micro-batches with a shared prefix, as transformers names it."""
        if policy.device.type == "cuda":
            self.attention_of_trees = "flex_attention"
        self._counts = np.zeros(3)
        """Sums of count_tokens over the updates that were split since the last step; 0 where another rank splits."""

    def split_over_ranks(
        self, sequences: list[TrainSequence], num_ranks: int
    ) -> list[list[Bundle]]:
        """Bundle the sequences of an update, and split the bundles over ranks: [rank] → bundles."""
        limit = self._policy.config.max_tokens_per_microbatch
        shares = choose_bundles(sequences, num_ranks, limit, self._share_prefix, self.cost)
        self._counts += count_tokens(sequences, shares)
        return shares

    def cost(self, lengths: list[int]) -> int:
        """Return the cost of computing bundles of `lengths` tokens; its unit depends on the attention."""
        module = self._policy.module
        if module.layout == "one_row":
            return sum(lengths)
        return dense_cost(lengths, module.model.config.get_text_config().hidden_size)

    def metrics(self) -> dict[str, float]:
        """Return shares of all tokens of a step's sequences, on all ranks.

        `tokens/saved_share` are not read. `tokens/shareable` would not be read by one tree of each update. They are ERR
        and POR of Tree Training, arXiv 2511.00413. Without an update that was split here there are no shares.
        """
        counts = self._policy.sum_over_ranks(torch.from_numpy(self._counts)).tolist()
        self._counts = np.zeros(3)
        num_all, num_read, num_distinct = counts
        if not num_all:
            return {}
        return {
            "tokens/saved_share": 1 - num_read / num_all,
            "tokens/shareable": 1 - num_distinct / num_all,
        }

    def forward(
        self,
        score: Callable[..., TokenScores],
        module: TokenLogprobs,
        batch: MicroBatch,
        attention_kwargs: dict | None,
    ) -> TokenScores:
        """Score the trained tokens of a micro-batch. Tokens that several branches train are computed once."""
        is_shared = batch.visible_until is not None
        attention = self.attention_of_trees if is_shared else module.attention
        # not set back: where layers are computed again on the way back, they read it then
        module.model.config._attn_implementation = attention
        if not is_shared:
            return score(module, batch, attention_kwargs)
        mask = {"attention_mask": attention_mask(attention, batch.visible_until)}
        if (
            self._policy.config.centering
        ):  # branches have other likeliest tokens in the place of an equal token
            return score(module, batch, mask)
        # sources and targets are below 2³¹
        pairs, places = (batch.sources << 32 | batch.targets).unique(return_inverse=True)
        distinct = replace(batch, sources=pairs >> 32, targets=pairs & 0x7FFFFFFF)
        scores = score(module, distinct, mask)
        return TokenScores(*(column[places] for column in scores[:3]))
