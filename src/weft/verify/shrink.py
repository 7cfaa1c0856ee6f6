"""Shrink a run without changing its structure: fewer layers of each kind, narrower where it divides, short rows.

Every change is reported. Ratios of heads, the pattern of layer kinds, ties, norms, gates and routing stay as they are.
If the model does not build at the reduced width, the reduction is halved until it does.
"""

from __future__ import annotations

from typing import Any

from weft.core.errors import ModelError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.models.adapter.targets import matching_parameters, matching_patterns
from weft.models.build import build_config, build_skeleton
from weft.models.positions import POSITION_KEYS, has_position_table
from weft.models.small_config import depth_overrides, stored_key, width_factor, width_overrides

SMALL_LENGTH = 32


def shrink(run: RunSpec, plan: Plan, *, vocab_size: int) -> tuple[RunSpec, list[str]]:
    """The small run, and the list of changes."""
    small, changes = _smaller(run, plan, vocab_size=vocab_size)
    return _with_adapter_of(small, vocab_size=vocab_size), changes


def _with_adapter_of(run: RunSpec, *, vocab_size: int) -> RunSpec:
    """The run with those patterns of its adapter that match the small model, and with drawn factors."""
    if not run.adapter.is_on:
        return run
    model = build_skeleton(build_config(run.model, vocab_size=vocab_size), attention=run.model.attention)
    targets, also = matching_patterns(model, run.adapter.targets), matching_parameters(model, run.adapter.train_also)
    adapter = run.adapter.model_copy(update={"targets": targets, "train_also": also, "path": None})
    return run.model_copy(update={"adapter": adapter})


def _smaller(run: RunSpec, plan: Plan, *, vocab_size: int) -> tuple[RunSpec, list[str]]:
    config = build_config(run.model, vocab_size=vocab_size).get_text_config()
    stages, listed = plan.mesh.pp * plan.pipeline.virtual_stages, sum(plan.pipeline.blocks or ())
    policies = 3 if plan.activations.policy == "budget" else 2  # of blocks: saved, fully or selectively recomputed
    depth = depth_overrides(config, least=max(policies, stages, listed))
    factor = width_factor(config, tp=plan.mesh.tp)
    while factor >= 1:
        overrides = {**depth, **width_overrides(config, factor, tp=plan.mesh.tp, ep=plan.mesh.ep)}
        model = run.model.model_copy(update={"config": {**run.model.config, **overrides}, "weights": "random"})
        small = run.model_copy(update={"model": model})
        if not overrides or _builds(small, vocab_size=vocab_size):
            changes = [_change(config, key, value) for key, value in overrides.items()]
            return _few_positions(*_short_rows(small, plan, changes), vocab_size=vocab_size)
        factor //= 2
    return _few_positions(*_short_rows(run, plan, []), vocab_size=vocab_size)


def _change(config: Any, key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{key}: the first {len(value)} of {len(getattr(config, key))}"
    return f"{key} {getattr(config, key)} -> {value}"


def _short_rows(run: RunSpec, plan: Plan, changes: list[str]) -> tuple[RunSpec, list[str]]:
    chunks = plan.mesh.dp_degree * plan.pipeline.microbatches
    rows = max(chunks, -(-8 // chunks) * chunks)
    tp = plan.mesh.tp
    length = min(run.data.sequence_length, max(SMALL_LENGTH // tp * tp, tp))  # sequence parallel shards it by tp
    if run.train.global_batch > rows:
        changes.append(f"global_batch {run.train.global_batch} -> {rows}")
        run = run.model_copy(update={"train": run.train.model_copy(update={"global_batch": rows})})
    if run.data.sequence_length > length:
        changes.append(f"sequence_length {run.data.sequence_length} -> {length}")
        run = run.model_copy(update={"data": run.data.model_copy(update={"sequence_length": length})})
        cut = {part.row_truncation for part in run.data.parts if part.row_packing != "concatenate"} - {"split"}
        if cut:
            # what counts is mostly at the end of a sample: short rows keep that
            changes.append(f"truncation {' and '.join(sorted(cut))} -> start")
            run = run.model_copy(update={"data": run.data.model_copy(update={"truncation": "start"})})
    return run, changes


def _few_positions(run: RunSpec, changes: list[str], *, vocab_size: int) -> tuple[RunSpec, list[str]]:
    """Shorten a learned position table to the row length, so that every position is used, the last one too."""
    config, length = build_config(run.model, vocab_size=vocab_size), run.data.sequence_length
    key = stored_key(config, POSITION_KEYS)
    if key is None or getattr(config, key) <= length or not has_position_table(run.model, key, vocab_size=vocab_size):
        return run, changes
    model = run.model.model_copy(update={"config": {**run.model.config, key: length}})
    small = run.model_copy(update={"model": model})
    if not _builds(small, vocab_size=vocab_size):
        return run, changes
    return small, [*changes, _change(config, key, length)]


def _builds(run: RunSpec, *, vocab_size: int) -> bool:
    try:
        build_skeleton(build_config(run.model, vocab_size=vocab_size), attention=run.model.attention)
    except ModelError:
        return False
    return True
