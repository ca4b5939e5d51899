"""From a causal LM to the log-probs of the trained tokens, without logits of all tokens: the head runs in chunks.

A chunk is the head, the engine's sampling transform, a float32 log-softmax and the pick of the target; only the hidden
states are kept, and the backward pass computes the chunk again. The head is called inside `TokenLogprobs.forward`, the
module that FSDP2 shards last: outside of it the head's weight would be a shard in float32, inside it is whole and in
the compute dtype, and is the embedding where the two are tied.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.trainer.attention import BY_BOUNDS, attention_inputs, mixes_sequences
from asyncrl.trainer.packing import Layout
from asyncrl.trainer.sampling import Sampling, sampling_logits

CHUNK_ROWS = 1024
"""Trained tokens per pass through the head: the most rows that a tensor [tokens, vocabulary] ever has."""


class TokenScores(NamedTuple):
    """What a forward pass says of the N trained tokens of a micro-batch."""

    logprobs: Tensor
    """[N] float32, nats, under the sampling transform."""
    entropy: Tensor
    """[N] float32, nats, of the distribution that each token was drawn from."""
    values: Tensor
    """[N] float32, of the state before each token; 0 without a value head."""


class TokenLogprobs(nn.Module):
    """A causal LM that returns the log-probs of trained tokens only, and never [tokens, vocabulary] as a whole."""

    def __init__(
        self, model: PreTrainedModel, chunk_rows: int = CHUNK_ROWS, trains_entropy: bool = False
    ) -> None:
        """`trains_entropy` lets the entropy carry gradient, which keeps two more chunks in the backward pass."""
        super().__init__()
        self.model = model
        self.value_head: nn.Module | None = None
        """The ValueHead of gae.py, with --advantage gae: from hidden states [N, H] to values [N] float32."""
        self.chunk_rows = chunk_rows
        self.attention = model.config._attn_implementation
        """As transformers names it; asyncrl/trainer/attention.py chooses it."""
        self.trains_entropy = trains_entropy
        self.layout: Layout = "one_row" if self.attention in BY_BOUNDS else "short_rows"
        """How that wants a micro-batch packed."""
        if mixes_sequences(model.config):
            self.layout = "row_each"

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        sources: Tensor,
        targets: Tensor,
        sampling: Sampling,
        attention_kwargs: dict | None = None,
    ) -> TokenScores:
        """Return the scores of the targets, [N] each.

        Tensors as in MicroBatch. `attention_kwargs` tell which tokens see which if positions do not. The
        head runs on `chunk_rows` tokens at a time and again in the backward pass. Beside the head's weight and its
        gradient, the most memory that takes is chunk_rows · vocabulary · 4 bytes times 3 (logits and their gradient in
        and out of the softmax), or times 6 where top_p < 1 (the sorted logits and their int64 order), times 4 where
        only top_k or min_p cut, or times 2 and the gradient again, which each chunk adds to. With 1024 rows and a
        vocabulary of 151 936 that is 1.9 GB, or 3.7 GB, 2.5 GB, or 2.5 GB with a hidden size of 4096, for any number of
        tokens.
        """
        if self.layout == "row_each":  # also at padding, or transformers sees other sequences there
            position_ids = torch.ones_like(position_ids).cumsum(dim=1) - 1
        if attention_kwargs is None:
            attention_kwargs = attention_inputs(self.attention, position_ids)
        outputs = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention_kwargs
        )
        rows = outputs.last_hidden_state.flatten(0, 1).index_select(0, sources)
        head = functools.partial(self.score_rows, sampling=sampling)
        parts = [
            checkpoint(head, chunk, chunk_targets, use_reentrant=False, preserve_rng_state=False)
            for chunk, chunk_targets in zip(
                rows.split(self.chunk_rows), targets.split(self.chunk_rows), strict=True
            )
        ]
        values = torch.zeros(len(rows), device=rows.device)
        if self.value_head is not None:
            values = self.value_head(rows)
        logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        return TokenScores(logprobs, entropy, values)

    def score_rows(
        self, hidden: Tensor, targets: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        # In float32 from the logits on: a bfloat16 log-prob is known to 3 digits, too few for a ratio of probabilities.
        # And nested, so that no name here keeps alive the [rows, vocabulary] tensor that the next one is made from.
        config = self.model.config.get_text_config()
        logprobs = sampling_logits(
            scale_logits(head(hidden).float(), config), targets, sampling
        ).log_softmax(dim=-1)
        picked = logprobs.gather(1, targets[:, None]).squeeze(1)
        if self.trains_entropy and torch.is_grad_enabled():
            chances = logprobs.exp()
            return picked, -(chances * logprobs.masked_fill(chances == 0, 0.0)).sum(dim=-1)
        # last, as the backward pass computes this again only up to what it needs
        with torch.no_grad():
            entropy = torch.special.entr(logprobs.exp()).sum(dim=-1)
        return picked, entropy


def scale_logits(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Return logits [..., V] as a family changes what its head says: by a factor, a divisor or a soft cap."""
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", 1.0)
    divisor = getattr(config, "logits_scaling", 1.0)
    if config.model_type == "hyperclovax":  # the one family that multiplies by it
        factor, divisor = divisor, 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return cap * (logits / cap).tanh()
    return logits if factor == divisor else logits * (factor / divisor)
