"""Precision carried out: torch dtypes, compute in low precision from float32 masters, dynamic loss scaling.

`fully_shard` casts when it gathers. `apply_compute_dtype` gives unsharded strategies the same arithmetic: each unit's
float32 parameters are cast for its forward, gradients flow back through the cast, so masters and gradients are float32.
Autocast is not used: it keeps a float32 residual stream, which is neither what was asked nor what sharding computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.core.precision import PrecisionPolicy
from weft.models.layout import ROOT, ModelLayout


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a torch dtype")
    return dtype


def apply_compute_dtype(model: nn.Module, layout: ModelLayout, policy: PrecisionPolicy) -> None:
    """Every unit computes in `policy.weights`; a no-op when that is the masters' dtype."""
    if policy.is_mixed:
        for unit in layout.units:
            _CastUnit(model, layout, unit, torch_dtype(policy.weights)).install()


class _CastUnit:
    """One unit whose parameters are replaced by casts during its forward, and put back after it."""

    def __init__(self, model: nn.Module, layout: ModelLayout, unit: str, dtype: torch.dtype) -> None:
        self.module = model if unit == ROOT else model.get_submodule(unit)
        self.dtype = dtype
        self.places = [
            (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if layout.unit_of[layout.ties.get(name, name)] == unit and parameter.is_floating_point()
        ]
        self.masters: list[tuple[nn.Module, str, nn.Parameter]] = []

    def install(self) -> None:
        self.module.register_forward_pre_hook(self._cast, with_kwargs=True, prepend=True)
        # always_call: an exception in forward must not leave casts where parameters belong
        self.module.register_forward_hook(self._restore, always_call=True)

    def _cast(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        casts: dict[int, torch.Tensor] = {}
        for owner, key in self.places:
            master = owner._parameters[key]
            if not isinstance(master, nn.Parameter):
                raise RuntimeError(f"{key} is already cast: the unit's forward was entered twice")
            self.masters.append((owner, key, master))
            if id(master) not in casts:
                casts[id(master)] = master.to(self.dtype)
            owner._parameters[key] = casts[id(master)]  # type: ignore[assignment]
        return _cast_floats(args, self.dtype), _cast_floats(kwargs, self.dtype)

    def _restore(self, *_: Any) -> None:
        for owner, key, master in self.masters:
            owner._parameters[key] = master
        self.masters.clear()


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast_floats(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast_floats(item, dtype) for item in value)
    return value


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
