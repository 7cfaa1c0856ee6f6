"""Attention as a region, sharded by heads. Separate or fused projections, gates, norms, sinks.

    q: heads x head_dim   k, v: kv_heads x head_dim   o: inputs heads x value_dim

Latent attention is in `mla`. A module with any other parameter is declined and stays replicated.
"""

from __future__ import annotations

from dataclasses import replace

from weft.models.tp.heads import HeadCounts, attributes_of, head_dim_of, require_divisible
from weft.models.tp.layout import LinearShards, ParameterShards, Region, Segment, WideNorm
from weft.models.tp.roles import (
    ATTENTION_ROLES,
    DeclinedError,
    LinearFacts,
    Site,
    child_linear,
    column_shard,
    entries_of,
    is_norm,
    linear_facts,
    parameters_beside,
    row_shard,
)
from weft.zoo.tensor_exceptions import FUSED_QKV, GATED_QUERY, INDEXED

_PER_HEAD = {"sinks", "gate_bias"}  # one number per head


def attention_region(site: Site, *, output: LinearFacts | None = None) -> Region | None:
    """The region of an attention module; None without projections of that kind.

    `output` is the output projection where another module holds it.
    """
    found = {role: child_linear(site, names) for role, names in ATTENTION_ROLES.items()}
    linears = {role: facts for role, facts in found.items() if facts is not None}
    if output is not None:
        linears["o"] = output
    if "o" not in linears or not ("qkv" in linears or {"q", "k", "v"} <= set(linears)):
        return None
    require_divisible(site)
    counts, columns = _fused(site, linears) if "qkv" in linears else _separate(site, linears)
    if "gate" in linears:
        columns = (*columns, _gate_shard(linears["gate"], counts, site))
    return assemble(site, counts=counts, columns=columns, row=linears["o"])


def split_attention_region(site: Site) -> Region | None:
    """The region of BERT's pair: `self` with query, key and value, and `output.dense`, before the residual is added."""
    inner, after = site.module._modules.get("self"), site.module._modules.get("output")
    dense = None if after is None else after._modules.get("dense")
    output = None if dense is None else linear_facts(site.child("output.dense"), dense)
    if inner is None or output is None:
        return None
    at = replace(site, name=site.child("self"), module=inner)
    try:
        return attention_region(at, output=output)
    except DeclinedError as error:
        raise DeclinedError(str(error), at=(at.name, output.name)) from error


def assemble(
    site: Site,
    *,
    counts: HeadCounts,
    columns: tuple[LinearShards, ...],
    row: LinearFacts,
    latents: tuple[LinearFacts, ...] = (),
) -> Region:
    """The region around its column-parallel linears; `latents` are linears inside that every rank computes."""
    linears = (*columns, row_shard(row, inputs=(_row_segment(columns, counts),)))
    facts = tuple(_facts_of(site, one) for one in linears)
    tensors, norms, partial = _extras(site, (*facts, *latents), counts)
    return Region(
        kind="attention",
        name=site.name,
        entries=entries_of(site, facts[:-1]),
        linears=linears,
        tensors=tensors,
        wide_norms=norms,
        heads=counts.query,
        kv_heads=counts.key,
        attributes=attributes_of(site, counts),
        partial=(*_parameters_of(site, latents), *partial),
    )


def _separate(site: Site, linears: dict[str, LinearFacts]) -> tuple[HeadCounts, tuple[LinearShards, ...]]:
    q, k, v, o = (linears[role] for role in "qkvo")
    key_dim = head_dim_of(site, default=q.outputs)
    value_dim = getattr(site.module, "v_head_dim", key_dim)
    counts = HeadCounts(
        heads=o.inputs // value_dim, kv_heads=k.outputs // key_dim, key_dim=key_dim, value_dim=value_dim
    )
    query = Segment(units=counts.heads, size=key_dim)
    if q.outputs == 2 * query.features and site.model_type in GATED_QUERY:
        query = Segment(units=counts.heads, size=2 * key_dim)
    return counts, (column_shard(q, (query,)), column_shard(k, (counts.key,)), column_shard(v, (counts.value,)))


def _fused(site: Site, linears: dict[str, LinearFacts]) -> tuple[HeadCounts, tuple[LinearShards, ...]]:
    orders = FUSED_QKV.get(site.model_type)
    if orders is None:
        raise DeclinedError("the order of its fused query-key-value projection is not known")
    order = next(order for flag, order in orders if not flag or getattr(site.module, flag, False))
    qkv, o = linears["qkv"], linears["o"]
    size = head_dim_of(site, default=o.inputs)
    heads = o.inputs // size
    kv_heads = heads if order == "heads" else (qkv.outputs // size - heads) // 2
    counts = HeadCounts(heads=heads, kv_heads=kv_heads, key_dim=size, value_dim=size, repeats=order == "parts")
    if order == "parts":
        return counts, (column_shard(qkv, (counts.query, counts.key, counts.value)),)
    group = (qkv.outputs // kv_heads) if kv_heads else 0
    return counts, (column_shard(qkv, (Segment(units=kv_heads, size=group),)),)


def _row_segment(columns: tuple[LinearShards, ...], counts: HeadCounts) -> Segment:
    """Heads, or groups of heads if the projection divides by group only."""
    first = columns[0].outputs
    if len(columns) == 1 and len(first) == 1 and first[0].units != counts.heads:
        return Segment(units=first[0].units, size=counts.output.features // first[0].units)
    return counts.output


def _gate_shard(gate: LinearFacts, counts: HeadCounts, site: Site) -> LinearShards:
    """A gate of the attention's output: one number per feature, or one per head."""
    if gate.outputs not in (counts.output.features, counts.heads):
        raise DeclinedError(
            f"its {gate.name.removeprefix(site.name + '.')} has neither one output per feature nor one per head"
        )
    return column_shard(gate, (Segment(units=counts.heads, size=gate.outputs // counts.heads),))


def _facts_of(site: Site, linear: LinearShards) -> LinearFacts:
    count = (sum(one.features for one in linear.inputs), sum(one.features for one in linear.outputs))
    return LinearFacts(name=linear.name, inputs=count[0], outputs=count[1], is_transposed=linear.is_transposed)


def _parameters_of(site: Site, linears: tuple[LinearFacts, ...]) -> tuple[str, ...]:
    found = []
    for facts in linears:
        module = site.module.get_submodule(facts.name.removeprefix(f"{site.name}."))
        found += [f"{facts.name}.{key}" for key, _ in module.named_parameters()]
    return tuple(found)


def _extras(
    site: Site, linears: tuple[LinearFacts, ...], counts: HeadCounts
) -> tuple[tuple[ParameterShards, ...], tuple[WideNorm, ...], tuple[str, ...]]:
    """Parameters outside the projections: norms over a head, over the full width, per head; sinks. Others decline."""
    tensors: list[ParameterShards] = []
    norms: dict[str, WideNorm] = {}
    partial: list[str] = []
    for name, owner, parameter in parameters_beside(site, linears):
        path, shape = name.removeprefix(f"{site.name}."), tuple(parameter.shape)
        segment = counts.key if path.startswith("k") else counts.query if path.startswith("q") else counts.output
        if path in _PER_HEAD and shape == (counts.heads,):
            tensors.append(ParameterShards(name=name, dim=0, segments=(Segment(units=counts.heads),)))
        elif path.startswith("indexer.") and site.model_type in INDEXED:
            partial.append(name)
        elif not is_norm(owner) or path.count(".") != 1:  # deeper: norms of single heads, in a list
            raise DeclinedError(f"its {path} is not recognised")
        elif shape == (segment.units, segment.size) and segment.units > 1:
            one_each = Segment(units=segment.units, may_repeat=segment.may_repeat)
            tensors.append(ParameterShards(name=name, dim=0, segments=(one_each,)))
        elif shape == (segment.features,) and segment.units > 1:
            norms[name.rpartition(".")[0]] = WideNorm(name=name.rpartition(".")[0], segments=(segment,))
        elif shape in ((counts.key_dim,), (counts.value_dim,)) or _is_latent(path):
            partial.append(name)
        else:
            raise DeclinedError(f"its {path} is a norm over features that are not recognised")
    return tuple(tensors), tuple(norms.values()), tuple(partial)


def _is_latent(path: str) -> bool:
    """Whether it is a norm of latent attention's compressed queries, keys and values."""
    return path.split(".")[0] in {"q_a_layernorm", "kv_a_layernorm", "q_a_norm", "kv_a_norm"}
