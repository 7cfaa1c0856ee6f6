"""ZeRO-1, 2, 3 and HSDP through `fully_shard`: the stages are policies over when to gather and when to reduce.

| stage | parameters                                   | gradients                                       |
| ----- | -------------------------------------------- | ----------------------------------------------- |
| 1     | gathered once, kept over all micro-batches   | accumulated unsharded, reduced on the last      |
| 2     | gathered once, kept over all micro-batches   | reduce-scattered every micro-batch              |
| 3     | gathered for each forward and each backward  | reduce-scattered every micro-batch              |

A parameter is sharded along dimension 0, or along an inner one that divides evenly where rows do not: experts
[experts, ...] on more ranks than experts (`core/shards.py: zero_dim`).

HSDP's all-reduce over the replicas happens on the last micro-batch only. Gradients are sums, never averages.

In a pipeline `fully_shard` does not get the replicas: it accumulates gradients for them in one flat tensor per unit, so
every micro-batch must have gradients of the same parameters. Stages and split backwards have them one after the other.
Nor does it where gradients travel as codes (`coded.py`): its own all-reduce cannot be replaced. It shards inside a
replica then, and each unit's shards are summed over the replicas when the last backward is done.

With a secondary shard the backward of ZeRO-3 gathers inside a group of neighbours (`secondary.py`).
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from weft.comm.coded_sums import CodedSum, Nodes
from weft.comm.sums import GroupSum
from weft.core.precision import PrecisionPolicy
from weft.core.shards import zero_dim
from weft.engine.dp.coded import CodedAllGather, CodedReduceScatter, errors_of_unit
from weft.engine.dp.integer_shards import patch_integer_shards
from weft.engine.dp.pipeline_replicas import sum_bucket
from weft.engine.dp.secondary import SecondaryAllGather
from weft.engine.dp.strategy import Strategy
from weft.engine.ownership import local
from weft.engine.precision import torch_dtype
from weft.engine.weights.units import shard_sizes
from weft.models.layout import ModelLayout


@dataclass(frozen=True, kw_only=True)
class StagePolicy:
    """The switches of a ZeRO stage."""

    keep_gathered: bool  # from the first forward to the last backward of a step
    reduce_every_microbatch: bool


STAGES = {
    1: StagePolicy(keep_gathered=True, reduce_every_microbatch=False),
    2: StagePolicy(keep_gathered=True, reduce_every_microbatch=True),
    3: StagePolicy(keep_gathered=False, reduce_every_microbatch=True),
}


def shard_units(
    model: nn.Module,
    layout: ModelLayout,
    *,
    mesh: DeviceMesh,
    stage: int,
    precision: PrecisionPolicy,
    experts: Mapping[str, DeviceMesh],
) -> None:
    """Blocks first, then the root with all the rest: the order that fully_shard requires.

    `experts`: modules that are units of their own inside their blocks, with the ranks that hold the same experts.
    """
    patch_integer_shards()
    mixed = MixedPrecisionPolicy()
    if precision.is_low:
        # gradients accumulate in it; `coded.py` rounds what travels
        mixed = MixedPrecisionPolicy(
            param_dtype=torch_dtype(precision.weights),
            reduce_dtype=torch.float32,
            cast_forward_inputs=not precision.has_wide_residual,  # blocks cast all but their stream themselves
        )
    # the inputs of experts have been cast with those of their block: weights of a float32 router stay float32
    inside = replace(mixed, cast_forward_inputs=False)
    reshard = not STAGES[stage].keep_gathered
    units = [(model.get_submodule(name), own, inside) for name, own in experts.items()]
    units += [(module, mesh, mixed) for module in (*(model.get_submodule(name) for name in layout.blocks), model)]
    for module, own, policy in units:
        placement = functools.partial(_placement, num_shards=own.size(own.ndim - 1))
        unit = fully_shard(
            module, mesh=own, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=placement
        )
        _require_sums(unit, num_ranks=own.size())
    # torch warns when a sharded module returns a view, since writing into it loses a hook. The objective only reads
    # the root's output; the warning stays on for blocks, whose outputs the model's own code handles.
    root = re.escape(type(model).__name__)
    warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({root}\) returned a view", category=UserWarning)


def _require_sums(unit: FSDPModule, *, num_ranks: int) -> None:
    """Make gradients of a unit plain sums."""
    if num_ranks > 1:  # one rank divides by 1 in any case: a factor would add a copy of all gradients of the unit
        unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)  # Gloo has no scaled sum, and the engine needs plain sums


def _placement(parameter: nn.Parameter, *, num_shards: int) -> Shard:
    return Shard(zero_dim(parameter.shape, num_shards=num_shards))


class Sharded(Strategy):
    """A model sharded by `shard_units`; `replicas` are those outside of `fully_shard`'s mesh."""

    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int,
        replicas: GroupSum | None = None,
        reduce: str = "float32",
        gather: str | None = None,
        neighbours: dist.ProcessGroup | None = None,
        feeds_back: bool = False,
        nodes: Nodes | None = None,
    ) -> None:
        """`reduce`, `gather`: formats in which gradients and weights travel; `neighbours`: who shares a secondary
        shard; `feeds_back`: errors of gradients are added to the next ones; `nodes`: codes are summed by node."""
        super().__init__(model)
        self._replicas = replicas
        self.stage_policy = STAGES[stage]
        self.accumulates_unsharded = not self.stage_policy.reduce_every_microbatch
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        coded = [CodedAllGather(gather, shard_sizes(unit)) for unit in self._units] if gather else []
        first = coded if gather else [None for _ in self._units]
        self._secondary = [SecondaryAllGather(neighbours, coded=one) for one in first] if neighbours else []
        for unit, own in zip(self._units, self._secondary or coded, strict=False):
            unit.set_custom_all_gather(cast(Any, own))
        # Listed now: while a unit is gathered its module shows other parameters, without gradients.
        self._shards = list(self._by_unit())
        if reduce != "float32":
            self._reduce_in_codes(reduce, feeds_back=feeds_back, nodes=nodes)

    def _reduce_in_codes(self, name: str, *, feeds_back: bool, nodes: Nodes | None) -> None:
        names = {module: name or "root" for name, module in self.module.named_modules()}
        units = list(zip(reversed(self._units), self._shards, strict=True))
        for unit, parameters in units:
            errors = errors_of_unit(parameters) if feeds_back else None
            if errors is not None:
                self.errors[names[unit]] = errors
            reduce = CodedReduceScatter(name, unit=names[unit], errors=errors, nodes=nodes)
            unit.set_custom_reduce_scatter(cast(Any, reduce))
        if feeds_back and isinstance(self._replicas, CodedSum):
            sizes = [sum(local(one).numel() for one in own if one.requires_grad) for own in self._shards]
            self._replicas.feed_back(sizes, device=next(self.module.parameters()).device)
            of_units = zip(units, self._replicas.errors, strict=True)
            self.errors |= {f"{names[unit]} (replicas)": errors for (unit, _), errors in of_units if errors.numel()}

    @property
    def root(self) -> FSDPModule:
        if not isinstance(self.module, FSDPModule):
            raise TypeError("the model was not sharded")
        return self.module

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        self._forget_secondary()
        self.root.set_is_last_backward(is_last)
        self.root.set_requires_gradient_sync(is_last or self.stage_policy.reduce_every_microbatch)
        self.root.set_requires_all_reduce(is_last)
        self.root.set_reshard_after_backward(is_last or not self.stage_policy.keep_gathered)
        yield

    @contextmanager
    def stage(self, blocks: Sequence[str], *, is_last: bool, is_very_last: bool) -> Iterator[None]:
        """Gradients of the rank's other stages may be incomplete: their units are not reduced.

        Several stages have gradients of the root: it is reduced and resharded with the very last.
        """
        own = {module for name in blocks for module in self.module.get_submodule(name).modules()}  # with its experts
        self.root.set_is_last_backward(is_very_last)
        for unit in self._units:
            is_done = is_very_last if unit is self.root else is_last and unit in own
            unit.set_requires_gradient_sync(is_done or self.stage_policy.reduce_every_microbatch, recurse=False)
            unit.set_reshard_after_backward(is_done or not self.stage_policy.keep_gathered, recurse=False)
        yield

    def prefetch_within_stages(self, stages: Sequence[Sequence[str]]) -> None:
        """A backward prefetches inside its stage alone. By default `fully_shard` follows the order of forwards, with
        those of other stages and micro-batches in between. Prefetching is off for units that prefetch themselves."""
        self.root.set_modules_to_backward_prefetch([self.root])
        for blocks in stages:
            units = [unit for unit in map(self.module.get_submodule, blocks) if isinstance(unit, FSDPModule)]
            for before, unit in zip([*units[:1], *units], units, strict=False):
                unit.set_modules_to_backward_prefetch([before])

    @contextmanager
    def backward_input(self) -> Iterator[None]:
        self.root.set_is_last_backward(False)
        self.root.set_requires_gradient_sync(False)
        self.root.set_reshard_after_backward(not self.stage_policy.keep_gathered)
        yield

    def backward_weight(self) -> None:
        # The end of a backward that autograd does not run. No public form; torch's own pipelines call the same.
        # tests/multiproc/engine/pp/test_schedules.py fails when it moves.
        self.root._get_fsdp_state()._root_post_backward_final_callback()

    def after_backwards(self) -> None:
        if self._replicas is not None:
            for place, parameters in enumerate(self._shards):
                gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
                if gradients:
                    sum_bucket(gradients, self._replicas, place=place)

    def _by_unit(self) -> Iterator[list[nn.Parameter]]:
        """The parameters of each unit, inner units first: the root has the rest."""
        seen: set[nn.Parameter] = set()
        for unit in reversed(self._units):
            own = [parameter for parameter in unit.parameters() if parameter not in seen]
            seen.update(own)
            yield own

    def drop_gathered(self) -> None:
        # A forward without a backward leaves units gathered; the next update would not change those copies.
        for unit in self._units:
            unit.reshard()
        self._forget_secondary()

    def _weights_may_change(self) -> None:
        super()._weights_may_change()
        self._forget_secondary()

    def _forget_secondary(self) -> None:
        """Of units without a backward: their next forward would gather old weights."""
        for one in self._secondary:
            one.kept = None
