"""Attention where several sequences of a row have read a prefix once: which models allow it, its mask and its cost.

A shared prefix is seen by several branches, which bounds of sequences cannot say. A GPU computes with FlexAttention,
which skips empty blocks of the mask, and the CPU with the model's own attention and a mask [R, 1, L, L].
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from asyncrl.trainer.attention import layer_kinds, mixes_sequences
from asyncrl.trainer.packing import first_fit_decreasing

COLUMNS_PER_HIDDEN = 4
"""Cost of all but attention for a token, in columns of a dense attention mask, over the model's hidden size. On a CPU
steps with short and long rows gave 3.7, 4.3 and 5.1 for the tiny model, 3.0 and 4.7 for SmolLM2-135M in bfloat16. By
operations it is 6."""


def unfit_for_sharing(config: PreTrainedConfig) -> list[str]:
    """Return what keeps a model from reading a prefix once for several sequences; empty if nothing does.

    A recurrent layer has one state after it. A window counts columns of the row, which are not the positions of a
    sequence behind the prefix.
    """
    window = getattr(config.get_text_config(), "sliding_window", None)
    kinds = layer_kinds(config)
    unfit = sorted(kinds - {"attention", "full_attention"})
    if not kinds and window:
        unfit = [f"sliding_window {window}"]
    return unfit or [f"the mask of {config.model_type}"] * mixes_sequences(config)


def mask_function(visible_until: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's mask_mod, which says whether a token of a row sees another: itself and those above it in
    the tree, which stand before it in the row and whose subtrees have not ended; `visible_until` as in MicroBatch."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < visible_until[row, key])

    return sees


def dense_mask(visible_until: Tensor) -> Tensor:
    """The mask function's values as a mask [R, 1, L, L] bool of queries × keys."""
    num_rows, width = visible_until.shape
    columns = torch.arange(width, device=visible_until.device)
    rows = torch.arange(num_rows, device=visible_until.device)[:, None, None, None]
    return mask_function(visible_until)(rows, rows, columns[:, None], columns)


def dense_cost(lengths: list[int], hidden_size: int) -> int:
    """Cost to compute a rank's bundles of `lengths` tokens in rows, in columns of a dense attention mask."""
    width = max(lengths, default=0)
    return (
        len(first_fit_decreasing(lengths, width))
        * width
        * (COLUMNS_PER_HIDDEN * hidden_size + width)
    )


def attention_mask(attention: str, visible_until: Tensor) -> object:
    """Return the mask for transformers' implementation of that name; `visible_until` as in MicroBatch."""
    if attention != "flex_attention":
        return dense_mask(visible_until)
    num_rows, width = visible_until.shape
    make = _block_mask_maker(visible_until.device.type)
    return make(mask_function(visible_until), num_rows, None, width, width, visible_until.device)


@functools.cache
def _block_mask_maker(device_type: str) -> Callable:
    """FlexAttention's create_block_mask; compiled on a GPU, where it then never holds the mask's L² entries itself."""
    from torch.nn.attention.flex_attention import create_block_mask

    return (
        torch.compile(create_block_mask, dynamic=True)
        if device_type == "cuda"
        else create_block_mask
    )
