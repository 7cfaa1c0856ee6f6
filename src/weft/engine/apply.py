"""The one screen where a plan meets a model. The order is the subtlest fact of the system, so it is all here.

1. freeze          before wrapping: strategies look at requires_grad
2. place           a module with values: to the device, rank 0's values to all
3. cut             tensor parallelism: parameters become this rank's parts, layers go around modules
4. shard           fully_shard, blocks then root, still on meta (ZeRO, HSDP): a shard of a part
5. materialise     each rank allocates and fills only its own parts
6. cast            compute dtype for unsharded strategies (sharded ones cast when they gather)
7. recompute       around the cast, which is repeated too; inside the hooks that gather and reduce, which are not
8. replicate       DDP, after values exist: its buckets are real memory
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from weft.core.errors import BadValueError
from weft.core.plan import Plan
from weft.engine.dp.ddp import Replicated
from weft.engine.dp.sharded import Sharded, shard_units
from weft.engine.dp.strategy import Strategy
from weft.engine.dp.threads import Threaded, require_gpus
from weft.engine.materialise import materialise, place_real_model
from weft.engine.mesh import Topology
from weft.engine.precision import apply_compute_dtype
from weft.engine.recompute import apply_recompute
from weft.engine.tp.apply import apply_tensor_parallel
from weft.engine.tp.face import TensorFace
from weft.models.initial import WeightSource
from weft.models.layout import ModelLayout, require_blocks


def apply_plan(
    model: nn.Module,
    plan: Plan,
    topology: Topology,
    *,
    layout: ModelLayout,
    device: torch.device,
    weights: WeightSource | None,
    frozen: Sequence[str] = (),
    has_own_objective: bool = False,
) -> tuple[Strategy, TensorFace]:
    """`model`, laid out as `plan` says, behind the faces of its data and tensor parallelism."""
    precision, dp = plan.precision.policy(), plan.data_parallel
    if dp.strategy == "dataparallel":
        require_gpus(precision)
    freeze(model, frozen)
    place_real_model(model, device=device)
    face = TensorFace()
    if topology.tp_degree > 1:
        face = apply_tensor_parallel(model, layout, plan.tensor_parallel, topology, keep_logits_whole=has_own_objective)
    parts = face.parts
    if dp.zero > 0:
        require_blocks(layout)
        shard_units(model, layout, mesh=topology.dp_mesh, stage=dp.zero, precision=precision)
        materialise(model, layout, weights, device=device, parts=parts)
        apply_recompute(model, layout, plan.activations.policy)
        return Sharded(model, stage=dp.zero), face
    materialise(model, layout, weights, device=device, parts=parts)
    apply_compute_dtype(model, layout, precision)
    apply_recompute(model, layout, plan.activations.policy)
    if dp.strategy == "dataparallel":
        return Threaded(model), face
    if topology.dp_degree > 1:
        group, may_be_unused = topology.dp_group, dp.find_unused_parameters
        return Replicated(model, group=group, find_unused_parameters=may_be_unused), face
    return Strategy(model), face


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose name matches a pattern get no gradient; a pattern that matches nothing is a mistake."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise BadValueError(
                f"train.frozen: no parameter matches {pattern!r}",
                hint=f"names look like {names[0]!r}; * matches anything",
            )
        for name in matched:
            model.get_parameter(name).requires_grad_(False)
