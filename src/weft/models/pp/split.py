"""Splits a model into pipeline stages: its blocks by stage, and the stage of every other parameter.

It describes; it changes nothing. A stage lasts from its first block until the next stage's first block:

    used before the first block                 the first stage
    used after a block, before the next         the stage of the block before
    used after the last block, or never         the last stage

`probe` finds all of it from the model's own forward. By default blocks are partitioned by cost (`costs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.core.errors import PipelineError
from weft.models.layout import ModelLayout
from weft.models.pp.costs import partition_model
from weft.models.pp.probe import HIDDEN, Place, ProbeView, Trace, UnfitError, require_stage, trace_forward

# Config fields whose effect a probe that runs no block cannot see
UNSEEN = {
    "layerdrop": "it leaves out blocks at random, and stages would not agree on which",
    "decoder_layerdrop": "it leaves out blocks at random, and stages would not agree on which",
    "num_kv_shared_layers": "its last blocks use keys and values of earlier ones, which stages do not send each other",
}


@dataclass(frozen=True, kw_only=True)
class PipelineSplit:
    """`stages[s]`: names of stage s's blocks, in the order of the forward.

    `before`: other parameters that are used before the blocks, on the first stage; `between`: those used between two
    blocks, by the stage that has them; all others are on the last. `idle`: blocks that no forward calls, on the last.
    """

    stages: tuple[tuple[str, ...], ...]
    before: frozenset[str]
    between: dict[str, int] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    hidden: Place = HIDDEN  # which argument of a block carries hidden states
    num_outputs: int = 0  # size of a block's output tuple; 0: a tensor, the hidden states
    beside: dict[str, int] = field(default_factory=dict)  # modules between blocks, and their stage

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage)

    def home(self, name: str) -> int:
        """The stage of a parameter outside the blocks."""
        return 0 if name in self.before else self.between.get(name, self.num_stages - 1)


def split_model(
    model: nn.Module, layout: ModelLayout, *, num_stages: int, sizes: Sequence[int] | None = None
) -> PipelineSplit:
    """Split `model`; `sizes`: blocks per stage, if the plan names them. Raises on all ranks or none."""
    _require_enough(model, len(layout.blocks), num_stages)
    try:
        _require_nothing_unseen(model)
        trace = trace_forward(model, layout)
        _require_enough(model, len(trace.order), num_stages)
        counts = tuple(sizes) if sizes else partition_model(model, layout, trace, num_stages=num_stages)
        _require_partition(counts, len(trace.order), num_stages)
        split = _split(trace, layout, counts)
        for stage in range(1, num_stages):
            require_stage(model, layout, trace, _view(split, trace, stage))
        return split
    except UnfitError as reason:
        raise PipelineError(
            f"{type(model).__name__} cannot be split into pipeline stages: {reason}",
            hint="use mesh.pp = 1; ZeRO-3 (data_parallel.zero = 3) shards any model",
        ) from reason


def _split(trace: Trace, layout: ModelLayout, counts: Sequence[int]) -> PipelineSplit:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    homes = {name: {_stage_at(time, ends) for time in times} for name, times in trace.uses.items()}
    for name, stages in homes.items():
        if len(stages) > 1:
            raise UnfitError(f"it uses {name} on several stages")
    before = frozenset(name for name, times in trace.uses.items() if 0 in times)
    between = {
        name: min(stages) for name, stages in homes.items() if name not in before and ends[-1] not in trace.uses[name]
    }
    split = PipelineSplit(
        stages=tuple(trace.order[end - count : end] for end, count in zip(ends, counts, strict=True)),
        before=before,
        between=between,
        idle=tuple(name for name in layout.blocks if name not in trace.order),
        hidden=trace.hidden,
        num_outputs=trace.num_outputs,
        beside={name: _stage_at(time, ends) for name, time in trace.beside.items()},
    )
    _require_ties_at_ends(split, layout)
    return split


def _view(split: PipelineSplit, trace: Trace, stage: int) -> ProbeView:
    begin = sum(len(blocks) for blocks in split.stages[:stage])
    lost = frozenset(name for name in trace.uses if split.home(name) < stage)
    return ProbeView(begin=begin, end=begin + len(split.stages[stage]), lost=lost)


def _stage_at(num_blocks_done: int, ends: Sequence[int]) -> int:
    """The stage of a module that runs after `num_blocks_done` blocks."""
    return next(stage for stage, end in enumerate(ends) if num_blocks_done <= end)


def _require_partition(counts: Sequence[int], num_blocks: int, num_stages: int) -> None:
    if len(counts) != num_stages or sum(counts) != num_blocks or min(counts) < 1:
        raise PipelineError(
            f"pipeline.blocks = {list(counts)} does not partition {num_blocks} blocks into {num_stages} stages",
            hint=f"name {num_stages} numbers, each at least 1, that add up to {num_blocks}; [] partitions by cost",
        )


def _require_enough(model: nn.Module, num_blocks: int, num_stages: int) -> None:
    if num_blocks < num_stages:
        raise PipelineError(
            f"{type(model).__name__} has {num_blocks} blocks, too few for {num_stages} pipeline stages",
            hint="lower mesh.pp or pipeline.virtual_stages",
        )


def _require_nothing_unseen(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key, clause in UNSEEN.items():
        if getattr(text, key, 0):
            raise UnfitError(f"{clause} (model.config.{key})")


def _require_ties_at_ends(split: PipelineSplit, layout: ModelLayout) -> None:
    """Refuse ties of inner stages: only the first and the last stage synchronise shared weights."""
    for alias, canonical in layout.ties.items():
        is_inner = alias in split.between or canonical in split.between
        if is_inner and split.home(alias) != split.home(canonical):
            raise UnfitError(f"it uses {canonical} on several stages, as {alias} too")
