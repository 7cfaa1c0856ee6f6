"""ZeRO-1, 2, 3 and HSDP through `fully_shard`: the stages are policies over when to gather and when to reduce.

| stage | parameters                                   | gradients                                       |
| ----- | -------------------------------------------- | ----------------------------------------------- |
| 1     | gathered once, kept over all micro-batches   | accumulated unsharded, reduced on the last      |
| 2     | gathered once, kept over all micro-batches   | reduce-scattered every micro-batch              |
| 3     | gathered for each forward and each backward  | reduce-scattered every micro-batch              |

HSDP's all-reduce over the replicas happens on the last micro-batch only. Gradients are sums, never averages.

In a pipeline the replicas are not `fully_shard`'s: it adds up what waits for them in one flat tensor a unit, so every
micro-batch must bring gradients of the same parameters. Stages and halves of a backward bring them one after the other.
There it shards inside a replica, and each unit's shards are summed over the replicas when the last backward is done.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from weft.core.precision import PrecisionPolicy
from weft.engine.dp.pipeline_replicas import sum_bucket
from weft.engine.dp.strategy import Strategy
from weft.engine.ownership import local
from weft.engine.precision import torch_dtype
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
    model: nn.Module, layout: ModelLayout, *, mesh: DeviceMesh, stage: int, precision: PrecisionPolicy
) -> None:
    """Blocks first, then the root with all the rest: the order fully_shard asks for."""
    mixed = MixedPrecisionPolicy()
    if precision.is_low:
        mixed = MixedPrecisionPolicy(
            param_dtype=torch_dtype(precision.weights), reduce_dtype=torch_dtype(precision.communication)
        )
    reshard = not STAGES[stage].keep_gathered
    for module in (*(model.get_submodule(name) for name in layout.blocks), model):
        fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
    # torch warns when a sharded module returns a view, since writing into it loses a hook. What the root returns is
    # only read, by the objective; the warning stays on for blocks, whose outputs the model's own code handles.
    root = re.escape(type(model).__name__)
    warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({root}\) returned a view", category=UserWarning)


class Sharded(Strategy):
    """A model whose units went through `shard_units`; `replicas` are those that `fully_shard` was not told of."""

    def __init__(self, model: nn.Module, *, stage: int, replicas: dist.ProcessGroup | None = None) -> None:
        super().__init__(model)
        self._replicas = replicas
        self.stage_policy = STAGES[stage]
        self.keeps_gradients_whole = not self.stage_policy.reduce_every_microbatch
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # Gloo has no scaled sum, and a plain sum is what is wanted
        # The shards, looked up now: while a unit is gathered its module shows other parameters, which have no gradient.
        self._shards = list(self._by_unit())

    @property
    def root(self) -> FSDPModule:
        if not isinstance(self.module, FSDPModule):
            raise TypeError("the model was not sharded")
        return self.module

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        self.root.set_is_last_backward(is_last)
        self.root.set_requires_gradient_sync(is_last or self.stage_policy.reduce_every_microbatch)
        self.root.set_requires_all_reduce(is_last)
        self.root.set_reshard_after_backward(is_last or not self.stage_policy.keep_gathered)
        yield

    @contextmanager
    def stage(self, blocks: Sequence[str], *, is_last: bool, is_very_last: bool) -> Iterator[None]:
        """Units of the rank's other stages may have gradients that are not complete: they are left alone.

        The root's come with several stages: it is complete, and let go, with the very last.
        """
        own = {self.module.get_submodule(name) for name in blocks}
        self.root.set_is_last_backward(is_very_last)
        for unit in self._units:
            is_done = is_very_last if unit is self.root else is_last and unit in own
            unit.set_requires_gradient_sync(is_done or self.stage_policy.reduce_every_microbatch, recurse=False)
            unit.set_reshard_after_backward(is_done or not self.stage_policy.keep_gathered, recurse=False)
        yield

    def keep_apart(self, stages: Sequence[Sequence[str]]) -> None:
        """A backward gathers ahead inside its own stage alone. By itself `fully_shard` goes by the order of forwards,
        where those of other stages and micro-batches come between. Who gathers itself ahead gathers nothing."""
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
        # The end of a backward that autograd does not see. No public form; torch's own pipelines call the same.
        # tests/multiproc/engine/pp/test_schedules.py fails when it moves.
        self.root._get_fsdp_state()._root_post_backward_final_callback()

    def after_backwards(self) -> None:
        if self._replicas is not None:
            for parameters in self._shards:
                gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
                if gradients:
                    sum_bucket(gradients, self._replicas)

    def _by_unit(self) -> Iterator[list[nn.Parameter]]:
        """Each unit's own parameters, inner units first: the root has what is left."""
        seen: set[nn.Parameter] = set()
        for unit in reversed(self._units):
            own = [parameter for parameter in unit.parameters() if parameter not in seen]
            seen.update(own)
            yield own

    def drop_gathered(self) -> None:
        # A forward without a backward leaves kept units gathered; the next update would not reach those copies.
        for unit in self._units:
            unit.reshard()
