"""Precision: torch dtypes, compute in low precision from float32 masters, dynamic loss scaling.

`fully_shard` casts when it gathers. `apply_compute_dtype` gives unsharded strategies the same arithmetic: each unit's
float32 parameters are cast for its forward, gradients flow back through the cast, so masters and gradients are float32.
The cast is part of the forward, not a hook: a recomputed forward casts again.
Autocast is not used: it keeps a float32 residual stream, which is neither the policy nor what sharding computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from weft.core.errors import DeviceError
from weft.core.plan import Plan
from weft.core.precision import PrecisionPolicy
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ROOT, ModelLayout


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a torch dtype")
    return dtype


def store_weights(model: nn.Module, dtype: torch.dtype, *, only_trained: bool = False) -> None:
    """Store parameters in `dtype`, tied ones still tied; buffers keep their dtype."""
    stored: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or dtype == torch.float32:
                continue
            if only_trained and not parameter.requires_grad:
                continue
            if parameter not in stored:
                stored[parameter] = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
            module._parameters[key] = stored[parameter]


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros in the dtype of the parameter's gradients, which may be wider than its own."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return found or parameter.dtype


@contextmanager
def rounding_to_tf32(is_on: bool) -> Iterator[None]:
    """Products of float32 operands round them to tf32 inside, on a GPU with such units; a CPU does not.

    torch's switch is the process's: without the context another engine's products would be rounded too.
    """
    if not is_on:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def products_of(plan: Plan, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context for steps and evaluations of `plan`; refuses tf32 on a GPU without such units."""
    has_tf32 = plan.policy().products == "tf32"
    if has_tf32:
        require_tf32(device)
    return lambda: rounding_to_tf32(has_tf32)


def require_tf32(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has no tf32 products",
            hint="they need Ampere (capability 8.0); set precision.preset = 'fp32'",
        )


def apply_compute_dtype(model: nn.Module, layout: ModelLayout, policy: PrecisionPolicy) -> None:
    """Every unit computes in `policy.weights`, its inputs cast to it; masters of that dtype are their own casts."""
    if policy.is_low:
        for unit in layout.units:
            module = model if unit == ROOT else model.get_submodule(unit)
            wrap_forward(module, _CastUnit(model, layout, unit, torch_dtype(policy.weights), policy.has_wide_residual))


class _CastUnit:
    """Replaces the parameters of one unit by casts during its forward, and restores them after it."""

    def __init__(
        self, model: nn.Module, layout: ModelLayout, unit: str, dtype: torch.dtype, keeps_inputs: bool = False
    ) -> None:
        """`keeps_inputs`: a layer of the unit's own casts them (`kernels/wide_residual.py`)."""
        self.dtype, self.keeps_inputs = dtype, keeps_inputs
        self.known: dict[int, tuple[ReferenceType[nn.Parameter], int, ReferenceType[torch.Tensor]]] = {}
        self.places = [
            (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if layout.unit_of[layout.ties.get(name, name)] == unit and parameter.is_floating_point()
        ]

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        masters = self._masters()
        casts = {id(master): self._cast(master) for master in masters}
        # try: an exception in forward (recomputation ends with one) must not leave casts in the place of parameters
        try:
            for (owner, key), master in zip(self.places, masters, strict=True):
                owner._parameters[key] = casts[id(master)]  # type: ignore[assignment]
            if self.keeps_inputs:
                return forward(*args, **kwargs)
            return forward(*cast_floats(args, self.dtype), **cast_floats(kwargs, self.dtype))
        finally:
            for (owner, key), master in zip(self.places, masters, strict=True):
                owner._parameters[key] = master

    def _cast(self, master: nn.Parameter) -> torch.Tensor:
        """The cast that a micro-batch in flight still holds, if any: else a pipeline would hold one per micro-batch.
        A weak reference: the cast lives as long as some backward needs it."""
        its_master, version, its_cast = self.known.get(id(master), (None, 0, None))
        cast = its_cast() if its_cast is not None else None
        is_same = its_master is not None and its_master() is master and version == master._version
        if cast is None or not is_same or cast.requires_grad != (master.requires_grad and torch.is_grad_enabled()):
            cast = _cast_of(master, self.dtype)
            self.known[id(master)] = (ref(master), master._version, ref(cast))
        return cast

    def _masters(self) -> list[nn.Parameter]:
        masters = [owner._parameters[key] for owner, key in self.places]
        for (_, key), master in zip(self.places, masters, strict=True):
            if not isinstance(master, nn.Parameter):
                raise RuntimeError(f"{key} is already cast: the unit's forward was entered twice")
        return [master for master in masters if master is not None]


def connect_gradient_leaf(weight: nn.Parameter, leaf: nn.Parameter) -> None:
    """Gradients of `weight` go to `leaf` from now on."""
    weight.gradient_leaf = leaf  # type: ignore[attr-defined]


def _cast_of(weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    leaf: nn.Parameter | None = getattr(weight, "gradient_leaf", None)
    if leaf is not None:
        return _OfLeaf.apply(leaf, weight.detach().to(dtype))  # type: ignore[no-any-return, no-untyped-call]
    # a weight that rests in this dtype: a view, whose gradients are summed before they are cast
    is_view = weight.dtype == dtype and gradient_dtype(weight) != dtype
    return weight.view_as(weight) if is_view else weight.to(dtype)


class _OfLeaf(torch.autograd.Function):
    """The values of a weight, whose gradient is a leaf's; autograd casts it to the leaf's dtype."""

    @staticmethod
    def forward(_context: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors within a value, in this dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value


def read_is_finite(norm: torch.Tensor) -> bool:
    """The one number of a step that the host waits for, in float16 only. A dry run has no numbers and returns True."""
    return bool(norm.isfinite().item())


class LossScale:
    """Dynamic loss scaling for float16. The decision follows from the global gradient norm, so all ranks agree."""

    def __init__(self, *, enabled: bool, initial: float = 2.0**16, grow_after: int = 1000) -> None:
        self.enabled = enabled
        self.value = initial if enabled else 1.0
        self.good_steps = 0
        self._grow_after = grow_after

    def update(self, *, is_finite: bool) -> None:
        """Halve after an overflow, double after `grow_after` good steps."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps >= self._grow_after:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        if self.enabled:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
