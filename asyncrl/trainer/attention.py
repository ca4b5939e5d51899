"""Chooses the trainer's attention, and tells it which tokens of a packed row may see each other.

On a GPU torch's `varlen_attn` or flash-attn takes the bounds of sequences. For torch's other attention transformers
makes a causal mask with a new block wherever positions restart. So plain sequences need no mask from this code.
"""

from inspect import signature

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

from asyncrl.trainer.packing import MicroBatch

BY_BOUNDS = ("varlen", "flash_attention_2")
"""Implementations that take the bounds of sequences. `varlen` is registered below."""
_WITHIN_A_SEQUENCE = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers in transformers that show a sequence of a packed row no other sequence."""
_BLIND_TO_POSITIONS = ("biogpt", "falcon", "gpt_oss", "opt")
"""Models whose mask, as transformers 5.19 makes it for torch's attention, ignores that positions restart."""
_WITHOUT_BOUNDS = ("nemotron",)
"""Models whose layers get no bounds of sequences from transformers 5.19."""
_CHANGES_SCORES = ("softcap", "s_aux", "position_bias")
"""Arguments that some models give their attention, and that varlen_attn lacks."""


def choose_attention(device: torch.device, config: PreTrainedConfig) -> str:
    """Return transformers' name of the attention.

    On a GPU this is flash_attention_2 if flash-attn is installed, else varlen. A CPU has sdpa (torch's own), or eager
    for families without sdpa. So has a GPU, if varlen cannot compute the model or each sequence has its own row.
    """
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    by_mask = "sdpa" if model._supports_sdpa else "eager"
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
    """Return whether flash-attn can be imported. Print a line if it is installed for another torch."""
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
    """Return why varlen_attn cannot compute a model on a GPU of this compute capability; None if it can."""
    text = config.get_text_config()
    sizes = head_sizes(text)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if capability < (8, 0):
        return (
            f"varlen_attn needs compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
        )
    if any(size % 8 or size > 256 for size in sizes):
        listed = ", ".join(map(str, sizes))
        return f"varlen_attn needs heads of a multiple of 8, at most 256; they have {listed}"
    takes_ours = model._supports_attention_backend and model._supports_sdpa
    if not takes_ours or config.model_type in _WITHOUT_BOUNDS:
        return f"transformers has a fixed attention for {config.model_type}"
    return None


def head_sizes(text: PreTrainedConfig) -> list[int]:
    """Return the head sizes of a text model's layers; some families have several."""
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
"""Allows fewer heads of keys than of queries. torch 2.11 needs no such argument."""


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
    """Compute causal attention of the sequences of one row, for transformers' models.

    Tensors are [1, heads, L, head_dim], and the result is [1, L, heads, head_dim]. With a window of w, a token sees
    itself and the w − 1 tokens before it. Raises ValueError for an argument that varlen_attn lacks.
    """
    if changed := [name for name in _CHANGES_SCORES if options.get(name) is not None]:
        raise ValueError(
            f"varlen_attn does not know the model's {changed[0]}; this model cannot be trained on a GPU"
        )
    # A norm may have turned queries and keys into float32, and the kernel takes 16 bits.
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    bounds, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(
        query, key, value, *bounds, *longest, scale=scaling, window_size=window, **_GROUPED
    )
    return out[None], None


# transformers makes no mask for a name without a mask function
AttentionInterface.register("varlen", varlen_attention)


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of layers that a config names; empty if all layers are alike."""
    text = config.get_text_config()
    return set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def mixes_sequences(config: PreTrainedConfig) -> bool:
    """Return whether a sequence of a packed row would change the next one, so that each needs its own row.

    Recurrent and convolving layers read a row from left to right.
    """
    return config.model_type in _BLIND_TO_POSITIONS or bool(
        layer_kinds(config) - _WITHIN_A_SEQUENCE
    )


def attention_inputs(implementation: str, batch: MicroBatch) -> dict:
    """Return the arguments of transformers' attention that separate sequences without a shared prefix."""
    if implementation not in BY_BOUNDS:
        return {}  # the mask is made from position_ids
    return {
        "cu_seq_lens_q": batch.bounds,
        "cu_seq_lens_k": batch.bounds,
        "max_length_q": batch.longest,
        "max_length_k": batch.longest,
    }
