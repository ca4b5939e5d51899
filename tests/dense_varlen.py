"""A CPU kernel of torch's varlen_attn, which has none: dense, by the meaning of its bounds and its window.

All above the kernel is torch's own: the checks of varlen_attn, its registration with autograd and with the compiler.
"""

import inspect

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""Whether torch must be told that keys have fewer heads; 2.11 need not."""


def visible(bounds: Tensor, window: list[int]) -> Tensor:
    """Mask [L, L] of queries × keys: of one sequence, and within (left, right) tokens of each other; −1: no limit."""
    length = int(bounds[-1])
    columns = torch.arange(length)
    of = torch.searchsorted(bounds, columns.int(), right=True)
    behind = columns[:, None] - columns
    left, right = (length if side < 0 else side for side in window)
    return (of[:, None] == of) & (-right <= behind) & (behind <= left)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float | None,
    window: list[int],
) -> Tensor:
    """Attention of one row in float32, [L, heads, head_dim]; keys and values may have fewer heads."""
    heads = (x.float().transpose(0, 1) for x in (query, key, value))
    mask = visible(bounds, window)
    out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(0, 1)


@varlen._varlen_attn.register_kernel("cpu")
def forward(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None,
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert enable_gqa or not KNOWS_GROUPS
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k), "as the GPU's kernel"
    assert query.dtype == key.dtype == value.dtype
    assert max_q == max_k == int(cu_seq_q.diff().max()) and int(cu_seq_q[-1]) == len(query)
    out = attend(query, key, value, cu_seq_q, scale, window_size).to(query.dtype).contiguous()
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(
    grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state, scale=None,
    window_size=None,
):  # fmt: skip
    inputs = [x.float() for x in (query, key, value)]
    _, pull_back = torch.func.vjp(lambda *x: attend(*x, cu_seq_q, scale, window_size), *inputs)
    return tuple(x.to(query.dtype).contiguous() for x in pull_back(grad_out.float()))
