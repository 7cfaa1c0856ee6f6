"""Plain causal attention of a rank's queries, piece by piece: each sees the keys up to its own end.

No masked key is multiplied but those of the piece's own triangle. On a GPU no mask exists: flash attention aligns a
causal mask to the last query and key. Elsewhere each piece has a mask of its queries.

With dropout it is one call, which `engine/activations/dropout.py` makes for the queries of the whole row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.cp.blocks import has_flash
from weft.engine.cp.exchange import POSITIONS
from weft.engine.cp.positions import Positions


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Positions, *, scale: float | None, dropout: float
) -> Tensor:
    """[rows, positions, heads, width]. `key` and `value` are of whole rows, with the heads of `query`."""
    if dropout > 0:
        is_grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
        return out.transpose(1, 2).contiguous()
    outs, begin = [], 0
    for span in positions.spans:
        seen = [whole.narrow(POSITIONS, 0, span.stop) for whole in (key, value)]
        outs.append(_piece(query.narrow(POSITIONS, begin, len(span)), *seen, scale=scale))
        begin += len(span)
    return torch.cat(outs, POSITIONS).transpose(1, 2).contiguous()


def _piece(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """The last query sees the last key."""
    queries, keys = query.shape[POSITIONS], key.shape[POSITIONS]
    is_grouped = query.shape[1] != key.shape[1]
    if queries == keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
    if has_flash(query, value) and not is_grouped:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, 0.0, is_causal=True, return_debug_mask=False, scale=scale)[0]
        return out
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale, enable_gqa=is_grouped)
