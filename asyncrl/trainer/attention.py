"""Which attention the trainer computes with, and what tells it which tokens of a packed row see which.

Sequences by themselves need no mask of ours: on a GPU torch's `varlen_attn` or flash-attn takes their bounds, and for
torch's other attention transformers makes a causal mask with a block wherever positions restart.
"""

from inspect import signature

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

BY_BOUNDS = ("varlen", "flash_attention_2")
"""Implementations that take the bounds of sequences; `varlen` is ours, registered below."""
_WITHIN_A_SEQUENCE = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
"""The kinds of layers that transformers names which see no other sequence of a packed row."""
_BLIND_TO_POSITIONS = ("biogpt", "falcon", "gpt_oss", "opt")
"""Models whose mask for torch's attention transformers 5.19 makes without the positions, which restart in a row."""
_WITHOUT_BOUNDS = ("nemotron",)
"""Models whose layers transformers 5.19 does not hand the bounds of sequences."""
_CHANGES_SCORES = ("softcap", "s_aux", "position_bias")
"""What some models give their attention besides a window; varlen_attn has none of it."""


def choose_attention(device: torch.device, config: PreTrainedConfig) -> str:
    """Return transformers' name of the attention: sdpa (torch's own) on the CPU, or eager for families without.

    On a GPU flash_attention_2 where flash-attn is there, else varlen. What that cannot compute, and where each sequence
    has a row of its own, is as on the CPU.
    """
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    by_mask = "sdpa" if model is None or model._supports_sdpa else "eager"
    if device.type != "cuda" or mixes_sequences(config):
        return by_mask
    if flash_attn_works():
        return "flash_attention_2"
    if reason := unfit_for_varlen(config, torch.cuda.get_device_capability(device)):
        print_on_rank_0(
            f"attention of the trainer takes a mask, which is slow and needs memory: {reason}"
        )
        return by_mask
    return "varlen"


def flash_attn_works() -> bool:
    """Whether flash-attn is there and was built for this torch; if it is only there, a line says so."""
    if not is_flash_attn_2_available():
        return False
    try:
        import flash_attn  # noqa: F401
    except ImportError as error:
        print_on_rank_0(
            f"flash-attn is installed but is not used, as its import fails ({error}): pip uninstall flash-attn"
        )
        return False
    return True


def unfit_for_varlen(config: PreTrainedConfig, capability: tuple[int, int]) -> str | None:
    """Why torch's FlashAttention 2 cannot compute a model on a GPU of this compute capability; None if it can."""
    text = config.get_text_config()
    sizes = head_sizes(text)
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if capability < (8, 0):
        return (
            f"varlen_attn needs compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
        )
    if any(size % 8 or size > 256 for size in sizes):
        listed = ", ".join(map(str, sizes))
        return f"varlen_attn needs heads of a multiple of 8, at most 256; they have {listed}"
    takes_ours = model and model._supports_attention_backend and model._supports_sdpa
    if not takes_ours or config.model_type in _WITHOUT_BOUNDS:
        return f"transformers lets nobody choose the attention of {config.model_type}"
    return None


def head_sizes(text: PreTrainedConfig) -> list[int]:
    """Return the sizes of the heads that layers of a text model have; some families have several."""
    layers = text.per_layer_config if text.is_heterogeneous else [text]
    sizes = [
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layers
    ]
    return sorted(set(sizes))


def print_on_rank_0(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


_GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Allows fewer heads of keys than of queries, which torch 2.11 allows without being asked."""


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Causal attention of the sequences of one row, [1, heads, L, head_dim] in and [1, L, heads, head_dim] out.

    The function that transformers' models call: a window of w lets a token see itself and the w − 1 before it.
    Raises ValueError for a score that is changed otherwise.
    """
    if changed := [name for name in _CHANGES_SCORES if options.get(name) is not None]:
        raise ValueError(
            f"varlen_attn does not know the model's {changed[0]}; this model cannot be trained on a GPU"
        )
    # A norm may have made float32 of queries and keys; the kernel takes 16 bits.
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    bounds, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(
        query, key, value, *bounds, *longest, scale=scaling, window_size=window, **_GROUPED
    )
    return out[None], None


# without a mask function of that name none is made
AttentionInterface.register("varlen", varlen_attention)


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of layers that a config names; none where all are alike."""
    text = config.get_text_config()
    return set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def mixes_sequences(config: PreTrainedConfig) -> bool:
    """Return whether a sequence of a packed row would change the next one, so that each needs a row of its own.

    A recurrent or convolving layer reads the row from left to right.
    """
    return config.model_type in _BLIND_TO_POSITIONS or bool(
        layer_kinds(config) - _WITHIN_A_SEQUENCE
    )


def attention_inputs(implementation: str, position_ids: Tensor) -> dict:
    """Arguments that tell the model, besides positions, which tokens see which; `position_ids` as in MicroBatch."""
    return varlen_bounds(position_ids) if implementation in BY_BOUNDS else {}


def varlen_bounds(position_ids: Tensor) -> dict:
    """Sequence boundaries of one packed row [1, L], as transformers' models hand them to their attention."""
    starts = torch.nonzero(position_ids[0] == 0).flatten().int()
    bounds = torch.cat([starts, starts.new_tensor([position_ids.shape[1]])])
    longest = int(bounds.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
