"""Which attention the trainer computes with, and what tells it which tokens of a packed row see which.

Sequences by themselves need no mask of ours: flash-attn takes their bounds, and for torch's own attention transformers
makes a causal mask with a block wherever positions restart. A shared prompt is seen by several segments, which the
bounds of flash-attn cannot say: a GPU then computes with FlexAttention, which skips the blocks of the mask that are
empty, and the CPU with torch's own attention and a mask [R, 1, L, L].
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

ONE_ROW = ("flash_attention_2", "flex_attention")
"""Implementations that skip what is masked, so that a micro-batch is best packed into one row."""


def choose_attention(device: torch.device, share_prefix: bool) -> str:
    """Return transformers' name of the attention to use: sdpa (torch's own) on the CPU.

    On a GPU flex_attention where prompts are shared, else flash_attention_2 where flash-attn is installed, else sdpa.
    """
    if device.type != "cuda":
        return "sdpa"
    if share_prefix:
        return "flex_attention"
    return "flash_attention_2" if importlib.util.find_spec("flash_attn") is not None else "sdpa"


def check_shares_prefix(config: PreTrainedConfig, path: str) -> None:
    """Raise ValueError for a model with layers that are not plain attention over the whole sequence.

    A window counts columns of the row, which are not the positions of a sequence behind a shared prompt, and a
    recurrent layer reads the row from left to right.
    """
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None) is not None:
        others = [f"sliding_window {text.sliding_window}"]
    if others:
        raise ValueError(
            f"--share-prefix needs full attention in every layer, {path} has {', '.join(others)}; leave the option out"
        )


def mask_function(segment_ids: Tensor, prefix_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's mask_mod, which says whether a token of a row sees another; tensors as in MicroBatch.

    It sees those of its own segment up to itself, and the prefix of its segment, which stands before it in the row.
    """

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        segment = segment_ids[row, key]
        return (key <= query) & ((segment == segment_ids[row, query]) | (segment == prefix_ids[row, query]))

    return sees


def dense_mask(segment_ids: Tensor, prefix_ids: Tensor) -> Tensor:
    """The mask function's values as a mask [R, 1, L, L] bool of queries × keys."""
    num_rows, width = segment_ids.shape
    columns = torch.arange(width, device=segment_ids.device)
    rows = torch.arange(num_rows, device=segment_ids.device)[:, None, None, None]
    return mask_function(segment_ids, prefix_ids)(rows, rows, columns[:, None], columns)


def attention_inputs(
    implementation: str, position_ids: Tensor, segment_ids: Tensor | None, prefix_ids: Tensor | None
) -> dict:
    """Arguments that tell the model, besides positions, which tokens see which; tensors as in MicroBatch."""
    if segment_ids is None:
        return varlen_bounds(position_ids) if implementation == "flash_attention_2" else {}
    if implementation != "flex_attention":
        return {"attention_mask": dense_mask(segment_ids, prefix_ids)}
    from torch.nn.attention.flex_attention import create_block_mask

    num_rows, width = segment_ids.shape
    sees = mask_function(segment_ids, prefix_ids)
    # Compiled, it never holds the mask itself, which has the square of a row's entries.
    on_gpu = segment_ids.device.type == "cuda"
    mask = create_block_mask(sees, num_rows, None, width, width, segment_ids.device, _compile=on_gpu)
    return {"attention_mask": mask}


def varlen_bounds(position_ids: Tensor) -> dict:
    """Sequence boundaries of one packed row [1, L], as transformers' flash attention takes them."""
    starts = torch.nonzero(position_ids[0] == 0).flatten().int()
    bounds = torch.cat([starts, starts.new_tensor([position_ids.shape[1]])])
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
