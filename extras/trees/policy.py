"""The policy of --share-prefix: sequences of an update that begin alike are read once."""

from dataclasses import replace

import numpy as np
import torch

from asyncrl.trainer.logprobs import Scored, TokenLogprobs
from asyncrl.trainer.packing import Bundle, MicroBatch, TrainSequence, Updates
from extras.trees.attention import attention_mask, dense_cost, unfit_for_sharing
from extras.trees.tree import choose_bundles, count_tokens


class Sharing:
    """What a policy does besides where it shares prefixes; a class of policies is to come behind this one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.module.model
        can_share = not unfit_for_sharing(model.config)
        self._share_prefix = self.config.share_prefix if can_share else "off"
        self.attention_of_trees = self.module.attention
        """That of micro-batches with a shared prefix, as transformers names it."""
        if self.device.type == "cuda":
            self.attention_of_trees = "flex_attention"
        self._counts = np.zeros(3)
        """What count_tokens says of the updates that were dealt since the last step; 0 where another rank deals."""

    def deal_update(self, sequences: list[TrainSequence], num_ranks: int) -> list[list[Bundle]]:
        """Bundle the sequences of an update, and deal the bundles to ranks: [rank] → bundles."""
        limit = self.config.max_tokens_per_microbatch
        deal = choose_bundles(sequences, num_ranks, limit, self._share_prefix, self._cost)
        self._counts += count_tokens(sequences, deal)
        return deal

    def _cost(self, lengths: list[int]) -> int:
        """Return the cost of computing bundles of `lengths` tokens; its unit depends on the attention."""
        if self.module.layout == "one_row":
            return sum(lengths)
        return dense_cost(lengths, self.module.model.config.get_text_config().hidden_size)

    def train_step(self, updates: Updates, policy_version: int) -> dict[str, float]:
        """Make the updates of a step, as Policy does; collective.

        Also returns shares of all tokens of its sequences, on all ranks: `tokens/saved_share`, which are not read, and
        `tokens/shareable`, which one tree of each update would not read (ERR and POR of Tree Training, arXiv
        2511.00413).
        """
        metrics = super().train_step(updates, policy_version)
        counts = self._sum_over_ranks(torch.from_numpy(self._counts)).tolist()
        self._counts = np.zeros(3)
        num_all, num_read, num_distinct = counts
        if not num_all:
            return metrics  # who dealt the updates did not ask here
        return metrics | {
            "tokens/saved_share": 1 - num_read / num_all,
            "tokens/shareable": 1 - num_distinct / num_all,
        }

    def _forward(self, module: TokenLogprobs, batch: MicroBatch, raw: bool = False) -> Scored:
        """Score the trained tokens of a micro-batch. What several branches train is computed once."""
        is_shared = batch.visible_until is not None
        attention = self.attention_of_trees if is_shared else module.attention
        # not set back: where layers are computed again on the way back, they read it then
        module.model.config._attn_implementation = attention
        if not is_shared:
            return super()._forward(module, batch, raw)
        # sources and targets are below 2³¹
        pairs, places = (batch.sources << 32 | batch.targets).unique(return_inverse=True)
        distinct = replace(batch, sources=pairs >> 32, targets=pairs & 0x7FFFFFFF)
        mask = {"attention_mask": attention_mask(attention, batch.visible_until)}
        scored = super()._forward(module, distinct, raw, seen=mask)
        return Scored(*(column[places] for column in scored))
