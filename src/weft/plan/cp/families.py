"""Whether rows of a run's model can be divided by position, asked of its own forward before ranks start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.core.model_shape import ModelShape
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.sequence_split import padded_length
from weft.models.build import build_config, build_skeleton
from weft.models.cp.probe import why_not_divided
from weft.models.cp.ring_probe import why_not_in_ring
from weft.plan.cp.rules import (
    GROUP_DROPOUT,
    GROUP_DROPOUT_HINT,
    RING_DROPOUT,
    RING_DROPOUT_HINT,
    drops_attention,
)
from weft.plan.per_run import kept_per_run

_GATHER = "set context_parallel.attention = 'gather'"
_FEW_TOKENS = 64  # of a model that takes its tokenizer's vocabulary


def check_context(plan: Plan, run: RunSpec, shape: ModelShape | None) -> list[tuple[str, str]]:
    """Reasons against `mesh.cp`, as (sentence, hint)."""
    one = "use mesh.cp = 1"
    drops = shape is not None and drops_attention(shape)
    if plan.context_parallel.attention == "ring" and drops:
        return [(RING_DROPOUT, RING_DROPOUT_HINT)]
    if plan.context_parallel.ulysses > 1 and drops:
        return [(GROUP_DROPOUT, GROUP_DROPOUT_HINT)]
    name, reason = _why_not_divided(run)
    if reason:
        return [(f"the sequence of {name} cannot be divided over ranks: {reason}", one)]
    name, reason = _why_not_in_ring(run) if plan.context_parallel.attention == "ring" else (name, "")
    if reason:
        return [(f"context_parallel.attention = 'ring' cannot add up the attention of {name}: {reason}", _GATHER)]
    over_heads = plan.context_parallel.head_ranks(plan.mesh.cp)
    degree = over_heads * plan.mesh.tp
    heads = [kind.attention.num_heads for kind in shape.kinds if kind.attention is not None] if shape else []
    uneven = [count for count in heads if count % degree]
    if over_heads > 1 and uneven:
        sentence = f"{uneven[0]} heads do not divide over {degree} ranks, which exchange them (context_parallel)"
        begin = f"{_GATHER} and" if plan.context_parallel.attention == "ulysses" else "set"
        return [(sentence, f"{begin} context_parallel.ulysses = {_most_neighbours(heads, plan)}")]
    return _padded_mixture(plan, run, shape)


@kept_per_run
def _why_not_divided(run: RunSpec) -> tuple[str, str]:
    return _named(run, why_not_divided)


@kept_per_run
def _why_not_in_ring(run: RunSpec) -> tuple[str, str]:
    return _named(run, why_not_in_ring)


def _named(run: RunSpec, why_not: Callable[[Any], str]) -> tuple[str, str]:
    """The class of the run's model, and the reason against it, or ""."""
    model = build_skeleton(build_config(run.model, vocab_size=_FEW_TOKENS), attention=run.model.attention)
    return type(model).__name__, why_not(model)


def _most_neighbours(heads: list[int], plan: Plan) -> int:
    """The largest groups that these heads divide over."""
    cp, tp = plan.mesh.cp, plan.mesh.tp
    sizes = [size for size in range(2, cp) if cp % size == 0 and all(count % (size * tp) == 0 for count in heads)]
    return max(sizes, default=1)


def _padded_mixture(plan: Plan, run: RunSpec, shape: ModelShape | None) -> list[tuple[str, str]]:
    """Positions that fill rows up would be routed: counted as load, given a place of an expert's capacity."""
    length, tensor = run.data.sequence_length, plan.tensor_parallel
    multiple = plan.mesh.tp if tensor.mode == "1d" and tensor.sequence_parallel else 1
    unit = padded_length(1, degree=plan.mesh.cp, split=plan.context_parallel.split, multiple=multiple)
    if shape is None or not shape.expert_layers or length % unit == 0:
        return []
    below = length - length % unit
    whole = below + unit
    sentence = f"rows of {length} positions do not divide over the ranks of mesh.cp, and a mixture would route padding"
    return [(sentence, f"set data.sequence_length = {whole}" + (f" or {below}" if below else ""))]
