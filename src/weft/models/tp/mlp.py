"""A feed-forward layer as a region: columns of the up (and gate) projections, the same rows of the down projection.

    hidden -> width (one or two projections, or both fused: width after width) -> hidden

An activation acts on each feature separately; a module whose code may mix features is declined.
"""

from __future__ import annotations

from weft.models.tp.layout import LinearShards, Region, Segment, Segments, WideNorm
from weft.models.tp.roles import (
    MLP_ROLES,
    DeclinedError,
    LinearFacts,
    Site,
    child_linear,
    column_shard,
    entries_of,
    is_norm,
    linear_facts,
    names_used,
    parameters_beside,
    row_shard,
)
from weft.zoo.tensor_exceptions import HALVES

# functions that mix features of a width, or take statistics over it
_MIXING = {"softmax", "mean", "std", "topk", "norm", "cumsum"}
_WIDTHS = {"intermediate_size", "ffn_dim", "inner_dim", "ffn_hidden_size"}


def mlp_region(site: Site) -> Region | None:
    """The region of a module that holds the projections, or None."""
    found = None if _is_crowded(site) else _projections(site)
    if found is None:
        return None
    columns, row = found
    used = names_used(site.module)
    if used & _MIXING:
        raise DeclinedError(f"its code reads {sorted(used & _MIXING)[0]}, which may mix the features of its width")
    if used & _WIDTHS:
        raise DeclinedError(f"its code reads {sorted(used & _WIDTHS)[0]}, so it depends on its width")
    if getattr(site.module, "pretraining_tp", 1) > 1:  # the module slices its own weights
        raise DeclinedError("pretraining_tp is set")
    norms, partial = _extras(site, (*columns, row))
    return Region(
        kind="mlp",
        name=site.name,
        entries=entries_of(site, columns),
        linears=_linear_shards(columns, row, has_chunk="chunk" in used or site.model_type in HALVES),
        wide_norms=norms,
        partial=partial,
    )


def loose_mlp_region(site: Site) -> Region | None:
    """The region of projections that are direct children of a block: OPT's fc1 and fc2, BERT's two dense."""
    found = _projections(site) if _is_crowded(site) else None
    column, row = (_inside(site, name) for name in ("intermediate.dense", "output.dense"))
    if found is None and column is not None and row is not None:
        found = (column,), row
    if found is None:
        return None
    columns, row = found
    try:
        linears = _linear_shards(columns, row, has_chunk=False)
    except DeclinedError as error:
        raise DeclinedError(str(error), at=tuple(facts.name for facts in (*columns, row))) from error
    entries = tuple(facts.name for facts in columns)
    return Region(kind="mlp", name=site.name, entries=entries, linears=linears)


def _is_crowded(site: Site) -> bool:
    """Whether any child has children: then the module is a block, not a feed-forward layer."""
    return any(child is not None and child._modules for child in site.module._modules.values())


def _inside(site: Site, path: str) -> LinearFacts | None:
    holder = site.module._modules.get(path.partition(".")[0])
    child = None if holder is None else holder._modules.get(path.partition(".")[2])
    return None if child is None else linear_facts(site.child(path), child)


def _projections(site: Site) -> tuple[tuple[LinearFacts, ...], LinearFacts] | None:
    for names, row_name in MLP_ROLES:
        columns = tuple(child_linear(site, (name,)) for name in names)
        row = child_linear(site, (row_name,))
        if row is not None and all(columns):
            return tuple(facts for facts in columns if facts is not None), row
    return None


def _linear_shards(columns: tuple[LinearFacts, ...], row: LinearFacts, *, has_chunk: bool) -> tuple[LinearShards, ...]:
    width = (Segment(units=row.inputs),)
    return (
        *(column_shard(facts, _outputs(facts, row.inputs, has_chunk=has_chunk)) for facts in columns),
        row_shard(row, inputs=width),
    )


def _outputs(facts: LinearFacts, width: int, *, has_chunk: bool) -> Segments:
    one = Segment(units=width)
    if facts.outputs == width:
        return (one,)
    if facts.outputs == 2 * width and has_chunk:
        return (one, one)
    raise DeclinedError(f"its projection of {facts.outputs} features does not match a width of {width}")


def _extras(site: Site, linears: tuple[LinearFacts, ...]) -> tuple[tuple[WideNorm, ...], tuple[str, ...]]:
    """Norms over the width and scalars of an activation; any other parameter declines the module."""
    width = linears[-1].inputs
    norms: dict[str, WideNorm] = {}
    partial: list[str] = []
    for name, owner, parameter in parameters_beside(site, linears):
        if is_norm(owner) and tuple(parameter.shape) == (width,):
            owner_name = name.rpartition(".")[0]
            norms[owner_name] = WideNorm(name=owner_name, segments=(Segment(units=width),))
        elif "activation" in type(owner).__name__.lower() and parameter.numel() == 1:
            partial.append(name)
        else:
            raise DeclinedError(f"its {name.removeprefix(site.name + '.')} is not recognised")
    return tuple(norms.values()), tuple(partial)
