"""Latent attention (DeepSeek V2 and others) as a region: up-projections are sharded by heads, latents replicated.

q_b (or q): heads x (nope + rope)   kv_b: heads x (nope + value)   o: inputs heads x value
q_a, kv_a and their norms: computed by every rank; each rank's gradient is a partial sum
"""

from __future__ import annotations

from weft.models.tp.attention import assemble
from weft.models.tp.heads import HeadCounts, require_divisible
from weft.models.tp.layout import LinearShards, Region, Segment
from weft.models.tp.roles import DeclinedError, Site, child_linear, column_shard


def latent_region(site: Site) -> Region | None:
    """The region of a latent attention module, or None."""
    kv_b, o = child_linear(site, ("kv_b_proj",)), child_linear(site, ("o_proj",))
    q = child_linear(site, ("q_b_proj", "q_proj"))
    if kv_b is None or o is None or q is None:
        return None
    require_divisible(site)
    down = tuple(child_linear(site, (name,)) for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    gate = child_linear(site, ("gate_proj", "g_proj"))
    value_dim, heads = getattr(site.module, "v_head_dim", None), getattr(site.module, "num_heads", None)
    if not isinstance(value_dim, int) or not isinstance(heads, int) or heads * value_dim != o.inputs:
        raise DeclinedError("its number of heads is unknown")
    if q.outputs % heads or kv_b.outputs % heads:
        raise DeclinedError("its heads do not divide its projections")
    counts = HeadCounts(heads=heads, kv_heads=heads, key_dim=q.outputs // heads, value_dim=value_dim, repeats=False)
    columns: tuple[LinearShards, ...] = (
        column_shard(q, (counts.query,)),
        column_shard(kv_b, (Segment(units=heads, size=kv_b.outputs // heads),)),
    )
    if gate is not None:
        if gate.outputs not in (heads * value_dim, heads):
            raise DeclinedError("its gate has neither one output per feature nor one per head")
        columns = (*columns, column_shard(gate, (Segment(units=heads, size=gate.outputs // heads),)))
    latents = tuple(facts for facts in down if facts is not None)
    return assemble(site, counts=counts, columns=columns, row=o, latents=latents)
