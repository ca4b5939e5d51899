"""Packed causal attention by torch, for TRL where there is no CUDA kernel; see bench_peers.py."""

import torch
from torch import Tensor

SEGMENTS_AT_ONCE = 64
"""Segments of similar length that one call of attention pads to the longest of them."""


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, *_, softmax_scale: float, **__
) -> Tensor:
    """Causal attention of S segments, as flash_attn_varlen_func: the last query of each sees all of its keys.

    Args: query [N, H, D], key and value [K, H, D]; starts [S + 1] int32. Returns [N, H, D].
    """
    lengths_q, lengths_k = starts_q.diff().long(), starts_k.diff().long()
    computed, positions = [], []
    for segments in lengths_k.argsort().split(SEGMENTS_AT_ONCE):
        rows = _rows(starts_q, lengths_q, segments)
        columns = _rows(starts_k, lengths_k, segments)
        behind = (lengths_k - lengths_q)[segments, None, None]
        seen = torch.arange(columns.shape[1]) <= torch.arange(rows.shape[1])[:, None] + behind
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[rows].transpose(1, 2),
            key[columns].transpose(1, 2),
            value[columns].transpose(1, 2),
            attn_mask=seen[:, None],
            scale=softmax_scale,
        )
        valid = torch.arange(rows.shape[1]) < lengths_q[segments, None]
        computed.append(attended.transpose(1, 2)[valid])
        positions.append(rows[valid])
    return torch.cat(computed)[torch.cat(positions).argsort()]


def _rows(starts: Tensor, lengths: Tensor, segments: Tensor) -> Tensor:
    """Packed positions of some segments, [segments, longest]; past a segment's end its last position."""
    offsets = torch.arange(int(lengths[segments].max())).minimum(lengths[segments, None] - 1)
    return starts.long()[segments, None] + offsets
