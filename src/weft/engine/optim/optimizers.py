"""Optimizers by name or from a user's factory, their decay groups, and their states before the first step.

Matrices decay, vectors (norms, biases) do not, and `[[train.groups]]` says otherwise by name. The kernel is the same on
every device and layout, so that a dry run on another device has the memory of the real one: adam and adamw fused, sgd
per parameter, unless the policy names one.
With states or weights in bfloat16 adamw is `adamw_low`; for large tensors on a GPU too, with the memory of fused.
Temporaries of an update: fused none; foreach one tensor per parameter of the larger group (the matrices).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from weft.core.errors import BadValueError, NotBuiltError
from weft.core.muon import Precision, Scale
from weft.core.optimizers import OPTIMIZERS, ROWS_ARE_SHARDED, OptimizerKind
from weft.core.parameter_groups import GroupSpec, decay_of, ratio_of
from weft.core.run_spec import TrainSpec
from weft.core.shards import LocalShard
from weft.engine.optim.adamw_low import AdamWLow, LowStates
from weft.engine.optim.lion import Lion
from weft.engine.optim.matrix_owners import MatrixOwners
from weft.engine.optim.muon import Muon
from weft.engine.optim.schedule_free import ScheduleFreeAdamW
from weft.engine.precision import zero_gradient

Kind = OptimizerKind
Kernel = Literal["auto", "fused", "foreach"]
RATIO = "learning_rate_ratio"  # of a group of parameters: its rate over the run's, where the optimizer has groups
# Takes one group with "params" and "param_names", as torch's optimizers do; or, if the argument is called
# `named_parameters`, (name, parameter) pairs.
OptimizerFactory = Callable[[list[Any]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class OptimizerPolicy:
    """An optimizer's name and constants."""

    kind: Kind = "adamw"
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    kernel: Kernel = "auto"
    groups: tuple[GroupSpec, ...] = ()
    ema_decay: float = 0.0
    muon_momentum: float = 0.95
    muon_scale: Scale = "match_rms_adamw"
    muon_precision: Precision = "auto"

    @staticmethod
    def of(train: TrainSpec) -> OptimizerPolicy:
        return OptimizerPolicy(
            kind=train.optimizer,
            learning_rate=train.learning_rate,
            betas=train.betas,
            epsilon=train.epsilon,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            kernel=train.optimizer_kernel,
            groups=tuple(train.groups),
            ema_decay=train.ema_decay,
            muon_momentum=train.muon_momentum,
            muon_scale=train.muon_scale,
            muon_precision=train.muon_precision,
        )


def make_optimizer(
    named: Mapping[str, nn.Parameter],
    given: OptimizerPolicy | OptimizerFactory | str,
    *,
    low: LowStates | None,
    shards: Mapping[str, LocalShard],
) -> Optimizer:
    """Build the engine's `optimizer` argument; `shards`: of parameters that axes other than ZeRO's shard."""
    if isinstance(given, str):
        given = OptimizerPolicy(kind=given)  # type: ignore[arg-type]
    if isinstance(given, OptimizerPolicy):
        if given.kind == "adamw8bit" and not all(shard.has_full_rows for shard in shards.values()):
            raise NotBuiltError(
                ROWS_ARE_SHARDED,
                hint="use train.optimizer = 'adamw', or mesh.tp = 1",
            )
        shapes: dict[torch.Tensor, torch.Size] = {
            named[name]: torch.Size(shard.shape) for name, shard in shards.items() if name in named
        }
        names = {parameter: name for name, parameter in named.items()}
        return build_optimizer(list(named.values()), given, low=low, shapes=shapes, names=names)
    if low is not None and low.rounds:
        raise BadValueError(
            "bfloat16 states and weights need weft's adamw, and the engine got another optimizer",
            hint="pass an OptimizerPolicy, or leave precision at its preset",
        )
    return given(list(named.items()) if _takes_pairs(given) else [_named_group(named)])


def _takes_pairs(factory: OptimizerFactory) -> bool:
    try:
        arguments = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return arguments[:1] == ["named_parameters"]


def _named_group(named: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """A group in torch's format: tensors under "params", their names under "param_names"."""
    return {"params": list(named.values()), "param_names": list(named)}


def build_optimizer(
    parameters: Sequence[nn.Parameter],
    policy: OptimizerPolicy,
    *,
    low: LowStates | None = None,
    shapes: Mapping[torch.Tensor, torch.Size] | None = None,
    names: Mapping[nn.Parameter, str] | None = None,
) -> Optimizer:
    """The optimizer of `policy` over the trainable parameters; `low` if the precision rounds in the update.

    `shapes`: the full shapes of parameters that axes other than ZeRO's shard. `names`: for groups by pattern.
    """
    groups = groups_of(names or dict.fromkeys(parameters, ""), policy)
    if low is not None and not low.rounds and (policy.kind, policy.kernel) != ("adamw", "auto"):
        low = None
    if policy.kind == "sgd" and low is None:
        return SGD(groups, lr=policy.learning_rate, momentum=policy.momentum, **_sgd_kernel(parameters, policy.kernel))
    if policy.kernel != "auto" and not OPTIMIZERS[policy.kind].has_kernels:
        raise BadValueError(
            f"{policy.kind} has a single kernel, and not {policy.kernel!r}", hint="leave optimizer_kernel at 'auto'"
        )
    if policy.kind == "lion" and low is None:
        return Lion(groups, lr=policy.learning_rate, betas=policy.betas)
    adam: dict[str, Any] = {"lr": policy.learning_rate, "betas": policy.betas, "eps": policy.epsilon}
    if policy.kind == "schedule_free" and low is None:
        return ScheduleFreeAdamW(groups, **adam)
    if low is not None:
        if low.rounds:
            _require_adamw(policy)
        return AdamWLow(groups, states=low, **adam)
    if policy.kind == "adamw8bit":
        return _adamw8bit(groups, {**adam, "shapes": shapes})
    return (AdamW if policy.kind == "adamw" else Adam)(groups, **_adam_kernel(parameters, policy.kernel), **adam)


def build_muon(
    named: Mapping[str, nn.Parameter],
    matrices: Collection[str],
    policy: OptimizerPolicy,
    *,
    owners: MatrixOwners,
    dtype: torch.dtype,
) -> Optimizer:
    """Muon for the parameters in `matrices`, torch's AdamW for the others, with the groups of `policy` in both."""
    names = {parameter: name for name, parameter in named.items()}
    groups = groups_of({value: name for value, name in names.items() if name in matrices}, policy)
    others = {value: name for value, name in names.items() if name not in matrices}
    adam: dict[str, Any] = {"lr": policy.learning_rate, "betas": policy.betas, "eps": policy.epsilon}
    rest = AdamW(groups_of(others, policy), **_adam_kernel(list(others), "auto"), **adam) if others else None
    return Muon(
        groups,
        rest,
        names=names,
        owners=owners,
        lr=policy.learning_rate,
        momentum=policy.muon_momentum,
        scale=policy.muon_scale,
        dtype=dtype,
    )


def _require_adamw(policy: OptimizerPolicy) -> None:
    hint = "use train.optimizer = 'adamw' with optimizer_kernel = 'auto', or leave precision at its preset"
    if policy.kind != "adamw":
        raise BadValueError(f"bfloat16 states and weights need adamw, and the optimizer is {policy.kind}", hint=hint)
    if policy.kernel != "auto":
        raise BadValueError(
            f"adamw with bfloat16 states or weights has a single kernel, and not {policy.kernel!r}", hint=hint
        )


def _adamw8bit(groups: list[dict[str, Any]], adam: dict[str, Any]) -> Optimizer:
    from weft.engine.optim.adamw_8bit import build_adamw8bit

    return build_adamw8bit(groups, **adam)


def _adam_kernel(parameters: Sequence[nn.Parameter], kernel: Kernel) -> dict[str, Any]:
    if kernel == "foreach":
        return {"foreach": True}
    # Fused kernels exist for CPU and CUDA; elsewhere torch chooses its default.
    has_fused = bool(parameters) and parameters[0].device.type in ("cpu", "cuda")
    return {"fused": True if kernel == "fused" or has_fused else None}


def _sgd_kernel(parameters: Sequence[nn.Parameter], kernel: Kernel) -> dict[str, Any]:
    if kernel == "auto":
        # torch's default would be foreach for plain parameters on a GPU and this loop for all others
        return {"foreach": False}
    if kernel == "fused" and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise NotBuiltError(
            "torch has no fused sgd for sharded parameters", hint="set train.optimizer_kernel to 'foreach' or 'auto'"
        )
    return {kernel: True}


def decay_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not. Torch's kernels take tensors of one mesh at a time: experts have their own."""
    groups: dict[tuple[bool, Any], dict[str, Any]] = {}
    for parameter in sorted(parameters, key=lambda one: one.ndim < 2):
        decay = weight_decay if parameter.ndim >= 2 else 0.0
        group = groups.setdefault((parameter.ndim >= 2, mesh_of(parameter)), {"params": [], "weight_decay": decay})
        group["params"].append(parameter)
    return list(groups.values())


def groups_of(names: Mapping[nn.Parameter, str], policy: OptimizerPolicy) -> list[dict[str, Any]]:
    return parameter_groups(names, policy) if policy.groups else decay_groups(list(names), policy.weight_decay)


def parameter_groups(names: Mapping[nn.Parameter, str], policy: OptimizerPolicy) -> list[dict[str, Any]]:
    """As `decay_groups`, for a policy with groups by pattern: by decay, rate and mesh; `GroupRates` reads RATIO."""
    groups: dict[tuple[float, float, Any], dict[str, Any]] = {}
    for parameter, name in names.items():
        decay = decay_of(name, policy.groups, num_dims=parameter.ndim, weight_decay=policy.weight_decay)
        ratio = ratio_of(name, policy.groups, peak=policy.learning_rate)
        new = {"params": [], "weight_decay": decay, "lr": policy.learning_rate * ratio, RATIO: ratio}
        groups.setdefault((decay, ratio, mesh_of(parameter)), new)["params"].append(parameter)
    return list(groups.values())


def mesh_of(parameter: nn.Parameter) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def create_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Create the missing states without changing a weight: one step with zero gradients and rates."""
    # parameters with state take no part: a zero gradient would still shrink their moments
    fresh = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not fresh:
        return
    # decay is off as well: coupled to the gradient (adam, sgd), it would enter the moments
    saved = [(group, float(group["lr"]), group.get("weight_decay")) for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for parameter in fresh:
        parameter.grad = zero_gradient(parameter)
    for group, _, decay in saved:
        set_group_rate(group, 0.0)
        if decay is not None:
            group["weight_decay"] = 0.0
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for parameter in fresh:
        for value in optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                value.zero_()  # the step counter: this step does not count
    for group, learning_rate, decay in saved:
        set_group_rate(group, learning_rate)
        if decay is not None:
            group["weight_decay"] = decay


def set_group_rate(group: dict[str, Any], learning_rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # torchao's optimizers require the same tensor object
        group["lr"].fill_(learning_rate)
    else:
        group["lr"] = learning_rate
