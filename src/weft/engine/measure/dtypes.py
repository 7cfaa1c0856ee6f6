"""The dtypes really used, read from live tensors in the first step and compared with the policy.

Weights are read inside a block's forward (recomputed ones too), activations from its output, communication from the
collectives of gradients (activations are sent in their own dtype), the rest after the update.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from weft.comm.observer import CollectiveObserver
from weft.core.precision import PrecisionPolicy
from weft.core.records import DtypeRecord
from weft.engine.optim.adamw_8bit import quantised_parts
from weft.engine.wrap_forward import Forward, innermost_layer
from weft.models.layout import ModelLayout

QUANTISED_STATE, QUANTISED_DTYPE = "quantised_state", "uint8"  # the large moments of an 8-bit optimizer
_GRADIENT_COLLECTIVES = ("all_reduce", "reduce_scatter")


class DtypeWatch:
    """Collects dtypes by component during `watching`."""

    def __init__(
        self, model: nn.Module, layout: ModelLayout, policy: PrecisionPolicy, *, activation_groups: Collection[str] = ()
    ) -> None:
        self._activation_groups = activation_groups  # names of groups that send activations, in their own dtype
        self._probe = model.get_submodule(layout.blocks[0]) if layout.blocks else model
        self._policy = policy
        self._found: dict[str, set[torch.dtype]] = {}

    @property
    def is_incomplete(self) -> bool:
        """Whether no update was observed yet: the first step of this engine, of a new run or a resumed one."""
        return "master_weights" not in self._found

    @contextmanager
    def watching(self, is_on: bool) -> Iterator[None]:
        if not is_on:
            yield
            return
        handle = self._probe.register_forward_hook(self._see_output)
        observer = CollectiveObserver(no_dtypes_of=self._activation_groups)
        try:
            with ExitStack() as stack:
                for unit, names in _units_in(self._probe):
                    stack.enter_context(innermost_layer(unit, functools.partial(self._see_weights, names)))
                stack.enter_context(observer)
                yield
        finally:
            handle.remove()
        for name in _GRADIENT_COLLECTIVES:
            for dtype in observer.dtypes.get(name, ()):
                if dtype.is_floating_point:  # DDP also all-reduces the set of used parameters
                    self._add("communication", dtype)

    def look_at(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        masters: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """After the update, before gradients are freed. `masters`: of parameters that are not their own."""
        for parameter in parameters:
            self._add("master_weights", masters.get(parameter, parameter).dtype)
            if parameter.grad is not None:
                self._add("gradients", parameter.grad.dtype)
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    parts = quantised_parts(value)
                    self._add(
                        QUANTISED_STATE if parts else "optimizer_state", parts.codes.dtype if parts else value.dtype
                    )

    def records(self) -> list[DtypeRecord]:
        return [
            DtypeRecord(
                component=component,
                asked=QUANTISED_DTYPE if component == QUANTISED_STATE else getattr(self._policy, component),
                found=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            )
            for component, dtypes in self._found.items()
        ]

    def _see_weights(self, names: Sequence[tuple[nn.Module, str]], forward: Forward, *args: Any, **kwargs: Any) -> Any:
        for module, name in names:
            self._add("weights", getattr(module, name).dtype)
        return forward(*args, **kwargs)

    def _see_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            self._add("activations", first.dtype)

    def _add(self, component: str, dtype: torch.dtype) -> None:
        self._found.setdefault(component, set()).add(dtype)


def _units_in(block: nn.Module) -> list[tuple[nn.Module, list[tuple[nn.Module, str]]]]:
    """The block and the units of `fully_shard` inside it (experts), with the homes and names of their own parameters:
    in the block's forward those of an inner unit are not gathered yet."""
    units = [module for module in block.modules() if module is block or isinstance(module, FSDPModule)]
    found, seen = [], set[nn.Module]()
    for unit in reversed(units):  # inner ones first
        own = [module for module in unit.modules() if module not in seen]
        seen.update(own)
        found.append(
            (
                unit,
                [(module, name) for module in own for name, value in module._parameters.items() if value is not None],
            )
        )
    return found
