"""Attention of query heads that share keys, without copies of these (grouped-query attention, arXiv 2305.13245)."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface


def shared_keys(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Query [R, G*K, n, e], key and value [R, K, s, e], mask [R or 1, 1, n, s] bool -> ([R, n, G*K, e], None).

    The G heads of a group become G*n queries of one head, under the mask G times. transformers copies keys and values
    G times instead: with a mask, CUDA's only kernel for ``enable_gqa`` is the one that keeps all scores.
    """
    rows, heads, n, size = query.shape
    shared = key.shape[1]
    folded = query.reshape(rows, shared, -1, size)
    tiled = attention_mask.repeat(1, 1, heads // shared, 1)
    out = F.scaled_dot_product_attention(folded, key, value, tiled, scale=scaling)
    return out.view(rows, heads, n, size).transpose(1, 2).contiguous(), None


AttentionInterface.register("shared_keys", shared_keys)
