"""The optimizer of an engine: where its update runs, which states rest in fewer bits, who owns whole matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.core import axes
from weft.core.errors import NotBuiltError
from weft.core.masters import resting_dtype
from weft.core.muon import AXIS, orthogonal_dtype
from weft.core.open_choices import update_place
from weft.core.optimizers import not_executed_with
from weft.engine.mesh import rank_lists
from weft.engine.optim.adafactor import Adafactor, held_parameters
from weft.engine.optim.adamw_low import LowStates
from weft.engine.optim.averages import attach_average
from weft.engine.optim.matrix_owners import Key, MatrixOwners, MatrixPiece, pieces_of
from weft.engine.optim.optimizers import (
    OptimizerFactory,
    OptimizerPolicy,
    build_muon,
    groups_of,
    make_optimizer,
)
from weft.engine.ownership import chunks_of
from weft.engine.precision import torch_dtype
from weft.models.matrices import matrix_names

if TYPE_CHECKING:
    from weft.engine.engine import Engine

_SHARDING = (axes.DP_SHARD, axes.CP, axes.TP)


def optimizer_for(engine: Engine, given: OptimizerPolicy | OptimizerFactory | str, *, seed: int) -> Optimizer:
    """Build the engine's `optimizer` argument under its plan."""
    if isinstance(given, str):
        given = OptimizerPolicy(kind=given)  # type: ignore[arg-type]
    if not isinstance(given, OptimizerPolicy):
        return _plain(engine, given, seed=seed)
    for sentence, hint in not_executed_with(given.kind, engine.plan, ema_decay=given.ema_decay):
        raise NotBuiltError(sentence, hint=hint)
    own = {"muon": _muon, "adafactor": _adafactor}.get(given.kind)
    optimizer = own(engine, given) if own is not None else _plain(engine, given, seed=seed)
    if given.ema_decay:
        attach_average(optimizer, given.ema_decay)
    return optimizer


def _plain(engine: Engine, given: OptimizerPolicy | OptimizerFactory, *, seed: int) -> Optimizer:
    plan, named, shards = engine.plan, engine.trained, engine.shards
    at_rest, policy, copies = torch_dtype(resting_dtype(plan)), plan.precision.policy(), engine.layout.copies
    found = LowStates.of(named, policy, seed=seed, shards=shards, copies=copies, at_rest=at_rest)
    on_host = update_place(plan, device_type=engine.device.type) == "host"
    low = None if on_host and found and not found.rounds else found  # its float32 form is a GPU's kernel
    return make_optimizer(named, given, low=low, shards=shards)


def _muon(engine: Engine, policy: OptimizerPolicy) -> Optimizer:
    names = matrix_names(engine.model, engine.layout)
    matrices = {name: parameter for name, parameter in engine.trained.items() if name in names}
    own: dict[Key, tuple[MatrixPiece, ...]] = {}
    for name, parameter in matrices.items():
        for key, piece in pieces_of(name, chunks_of(parameter, engine.shards.get(name))):
            own[key] = (*own.get(key, ()), piece)
    shapes = {name: _matrix_shape(engine, name, parameter) for name, parameter in matrices.items()}
    dtype = orthogonal_dtype(policy.muon_precision, is_cpu=engine.device.type == "cpu")
    owners = MatrixOwners(own, shapes, group=_sharing_ranks(engine))
    return build_muon(engine.trained, frozenset(matrices), policy, owners=owners, dtype=torch_dtype(dtype))


def _adafactor(engine: Engine, policy: OptimizerPolicy) -> Optimizer:
    group = _sharing_ranks(engine)
    held = held_parameters(engine.trained, engine.shards, group)
    groups = groups_of({parameter: name for name, parameter in engine.trained.items()}, policy)
    return Adafactor(groups, held=held, group=group, lr=policy.learning_rate)


def _matrix_shape(engine: Engine, name: str, parameter: nn.Parameter) -> tuple[int, int]:
    shard = engine.shards.get(name)
    *_, rows, columns = shard.shape if shard is not None else parameter.shape
    return rows, columns


def _sharing_ranks(engine: Engine) -> dist.ProcessGroup | None:
    """A group of the ranks that shard the parameters of this rank's stages; None where one rank has them all."""
    topology = engine.topology
    over = [name for name in topology.axis_names if name in _SHARDING]
    lists = rank_lists(topology.mesh, over)
    if len(lists[0]) == 1:
        return None
    group = topology.groups.new_partition(lists, title=AXIS)
    topology.more_axes[str(group.group_name)] = AXIS
    return group
