"""Computes log-probs of the trained tokens without logits of all tokens: the head runs in chunks.

A chunk is the head, the engine's sampling transform, a float32 log-softmax and the pick of the target. The backward
pass computes most chunks again, so of these only hidden states are kept. The head must be called inside
`TokenLogprobs.forward`: only there has FSDP2 gathered its weight, in the dtype of computing.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.trainer.attention import BY_BOUNDS, mixes_sequences
from asyncrl.trainer.packing import Layout
from asyncrl.trainer.sampling import Sampling, sampling_logits

CHUNK_ROWS = 1024
"""Trained tokens in one pass of the head: the most rows of any tensor [tokens, vocabulary]."""
KEPT_LOGITS = 2**28
"""Numbers, of 4 bytes, that the last chunks keep for the backward pass. A chunk that keeps them is computed once."""


class TokenScores(NamedTuple):
    """Scores of the N trained tokens of a micro-batch."""

    logprobs: Tensor
    """[N] float32, nats, under the sampling transform."""
    entropy: Tensor
    """[N] float32, nats, entropy of the distribution at each token."""
    values: Tensor
    """[N] float32, value of the state before each token; 0 without a value head."""
    top_logprobs: Tensor | None = None
    """[N, K] float32, nats, of the recorded likeliest tokens (TokenColumns.top_ids); None unless asked for."""


class TokenLogprobs(nn.Module):
    """A causal LM that returns log-probs of trained tokens, and never makes a whole [tokens, vocabulary] tensor."""

    def __init__(
        self, model: PreTrainedModel, chunk_rows: int = CHUNK_ROWS, trains_entropy: bool = False
    ) -> None:
        """If it `trains_entropy`, the entropy carries gradient, and a chunk keeps three times as much."""
        super().__init__()
        self.model = model
        self.value_head: nn.Module | None = None
        """The ValueHead of gae.py, with --advantage gae: from hidden states [N, H] to values [N] float32."""
        self.chunk_rows = chunk_rows
        self.attention = model.config._attn_implementation
        """transformers' name of the attention (asyncrl/trainer/attention.py)."""
        self.trains_entropy = trains_entropy
        self.layout: Layout = "one_row" if self.attention in BY_BOUNDS else "short_rows"
        """Layout of a micro-batch that this attention needs."""
        if mixes_sequences(model.config):
            self.layout = "row_each"

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        sources: Tensor,
        targets: Tensor,
        sampling: Sampling,
        attention_kwargs: dict,
        top_ids: Tensor | None = None,
    ) -> TokenScores:
        """Return the scores of the targets, [N] each, and log-probs of the tokens `top_ids` [N, K] in their places.

        MicroBatch describes the tensors. `attention_kwargs` tell which tokens see each other (attention_inputs).

        The head runs on `chunk_rows` tokens at a time. Its peak is a multiple of chunk_rows · vocabulary · 4 bytes, for
        any number of tokens. The head's weight and gradient are not counted. Here it is for 1,024 rows and a vocabulary
        of 151,936:

            case                         factor    GB
            plain                             3   1.9    logits, and their gradient in and out of the softmax
            top_p < 1                         6   3.7    also the sorted logits and their int64 order
            only top_k or min_p               4   2.5
            several chunks             2 + head   2.5    each chunk adds to the head's gradient (hidden size 4,096)

        Chunks that are kept need up to 4 · KEPT_LOGITS bytes more.
        """
        if self.layout == "row_each":  # padding, too: else it looks like other sequences
            position_ids = torch.ones_like(position_ids).cumsum(dim=1) - 1
        outputs = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention_kwargs
        )
        rows = outputs.last_hidden_state.flatten(0, 1).index_select(0, sources)
        head = functools.partial(self.score_rows, sampling=sampling)
        columns = [rows, targets] if top_ids is None else [rows, targets, top_ids.long()]
        logprobs, entropy, *top = self._in_chunks(head, columns)
        values = torch.zeros(len(rows), device=rows.device)
        if self.value_head is not None:
            values = self.value_head(rows)
        return TokenScores(logprobs, entropy, values, *top)

    def _in_chunks(
        self, head: Callable[..., tuple[Tensor, ...]], columns: list[Tensor]
    ) -> list[Tensor]:
        """Return the columns [N, …] that the head makes of `columns` [N, …], `chunk_rows` rows at a time."""
        chunks = list(zip(*(column.split(self.chunk_rows) for column in columns), strict=True))
        # The backward pass begins with the last chunk, so computing that one again would save no memory.
        num_again = len(chunks) - self.num_kept_chunks()
        recomputed_head = functools.partial(
            checkpoint, head, use_reentrant=False, preserve_rng_state=False
        )
        parts = [
            (recomputed_head if index < num_again else head)(*chunk)
            for index, chunk in enumerate(chunks)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def num_kept_chunks(self) -> int:
        """Return how many of the last chunks keep their logits for the backward pass."""
        vocab_size = self.model.config.get_text_config().vocab_size
        return max(1, KEPT_LOGITS // (self.chunk_rows * vocab_size))

    def score_rows(
        self,
        hidden: Tensor,
        targets: Tensor,
        top_ids: Tensor | None = None,
        *,
        sampling: Sampling,
    ) -> tuple[Tensor, ...]:
        head = self.model.get_output_embeddings()
        # Logits are float32: a bfloat16 log-prob has 3 digits, too few for a ratio of probabilities.
        # The calls are nested, so that no name keeps a [rows, vocabulary] tensor alive.
        config = self.model.config.get_text_config()
        logprobs = sampling_logits(
            scale_logits(head(hidden).float(), config), targets, sampling
        ).log_softmax(dim=-1)
        picked = logprobs.gather(1, targets[:, None]).squeeze(1)
        top = () if top_ids is None else (logprobs.gather(1, top_ids),)
        if self.trains_entropy and torch.is_grad_enabled():
            chances = logprobs.exp()
            return picked, -(chances * logprobs.masked_fill(chances == 0, 0.0)).sum(dim=-1), *top
        # The entropy comes last: the backward pass stops computing again before it. torch.special.entr would compute
        # logarithms again, slowly on a CPU. A token that the sampling excludes gives 0 * -inf.
        with torch.no_grad():
            entropy = -logprobs.exp().mul_(logprobs).nansum(dim=-1)
        return picked, entropy, *top


def scale_logits(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Return logits [..., V] after a family's own factor, divisor or soft cap."""
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", 1.0)
    divisor = getattr(config, "logits_scaling", 1.0)
    if config.model_type == "hyperclovax":  # the one family that multiplies by it
        factor, divisor = divisor, 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return cap * (logits / cap).tanh()
    return logits if factor == divisor else logits * (factor / divisor)
