"""Attention of sequences in a row that share a prefix read once: models that allow it, its mask and cost.

Several branches see a shared prefix, and bounds of sequences cannot express this. A GPU computes with FlexAttention. It
skips empty blocks of the mask. The CPU computes with the model's own attention and a mask [R, 1, L, L].
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from asyncrl.trainer.attention import layer_kinds, mixes_sequences
from asyncrl.trainer.packing import first_fit_decreasing

COLUMNS_PER_HIDDEN = 4
"""Cost of all but attention for a token, in columns of a dense attention mask, over the model's hidden size. Steps with
short and long rows on a CPU gave 3.7, 4.3 and 5.1 for the tiny model. They gave 3.0 and 4.7 for SmolLM2-135M in
bfloat16. By operations it is 6."""


def unfit_for_sharing(config: PreTrainedConfig) -> list[str]:
    """Return the reasons why a model cannot read a prefix once for several sequences; empty if it can.

    A recurrent layer has one state after it. A window counts columns of the row. They are not the positions of a
    sequence behind the prefix.
    """
    window = getattr(config.get_text_config(), "sliding_window", None)
    kinds = layer_kinds(config)
    unfit = sorted(kinds - {"attention", "full_attention"})
    if not kinds and window:
        unfit = [f"sliding_window {window}"]
    return unfit or [f"the mask of {config.model_type}"] * mixes_sequences(config)


def mask_function(visible_until: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's mask_mod: whether a token of a row sees another; `visible_until` as in MicroBatch.

    It sees itself and the tokens above it in the tree. They are before it in the row, and their subtrees have not
    ended.
    """

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
