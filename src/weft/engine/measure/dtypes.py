"""The dtypes really used, read from live tensors in the first step and compared with the policy.

Weights are read inside a block's forward (recomputed ones too), activations and the residual stream from its output and
input, reduce and gather from the collectives of gradients and weights (activations are sent in their own dtype),
routers and logits from the outputs of their modules, further components from operators (`operator_dtypes.py`) and from
the engine's own code (`seen.py`), the rest after the update.

Compiled blocks run no operators that could be seen, and get no hooks inside, which would compile them twice.
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
from weft.comm.watch import OperatorWatch
from weft.core.plan import Plan
from weft.core.precision import COMPONENTS, LOW_PRODUCTS, PrecisionPolicy
from weft.core.records import DtypeRecord
from weft.engine.measure.operator_dtypes import OperatorDtypes
from weft.engine.measure.seen import listening
from weft.engine.optim.adamw_8bit import quantised_parts
from weft.engine.optim.averages import EMA
from weft.engine.wrap_forward import Forward, innermost_layer
from weft.models.layout import ModelLayout

QUANTISED_STATE, QUANTISED_DTYPE = "quantised_state", "uint8"  # the large moments of an 8-bit optimizer
OTHER_STATE = "optimizer_state"  # of an optimizer that is not torch's: neither moment by its name
_MOMENTS = {"exp_avg": "first_moment", "momentum_buffer": "first_moment", "exp_avg_sq": "second_moment"}
_COLLECTIVES = {"reduce": ("all_reduce", "reduce_scatter"), "gather": ("all_gather",)}
# what a model's code decides where the plan does not name it
_OF_THE_MODEL = ("norm_statistics", "softmax", "router", "experts", "logits", "aux_loss")


def watch_dtypes(
    model: nn.Module,
    layout: ModelLayout,
    plan: Plan,
    *,
    routers: Mapping[str, int | None],
    has_float8: Mapping[str, bool],
    activation_groups: Collection[Any],
) -> DtypeWatch:
    """The watch of an engine. `has_float8`: components that some layer has in float8; others are too small for it."""
    asked, plain = plan.policy(), plan.precision.policy().weights
    in_float8 = {**has_float8, "gather": has_float8["gather"] or bool(plan.coded_gather)}
    too_small = {name: plain for name, has in in_float8.items() if getattr(asked, name) in LOW_PRODUCTS and not has}
    return DtypeWatch(
        model,
        layout,
        asked.model_copy(update=too_small),
        given=plan.precision.given,
        routers=routers,
        is_compiled=plan.compile.enabled,
        activation_groups={str(group.group_name) for group in activation_groups},
    )


class DtypeWatch:
    """Collects dtypes by component during `watching`."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        policy: PrecisionPolicy,
        *,
        given: Collection[str] = (),
        routers: Mapping[str, int | None] | None = None,
        is_compiled: bool = False,
        activation_groups: Collection[str] = (),
    ) -> None:
        """`given`: components that the plan names. `routers`: modules, and the place of logits in their outputs.
        `activation_groups`: names of groups that send activations, in their own dtype."""
        self._activation_groups = activation_groups
        self._probe = model.get_submodule(layout.blocks[0]) if layout.blocks else model
        self._head = _head_of(model)
        self._routers = [(model.get_submodule(name), place) for name, place in (routers or {}).items()]
        self._policy, self._given, self._is_compiled = policy, given, is_compiled
        self._found: dict[str, set[str]] = {}
        self._observer: CollectiveObserver | None = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Collectives inside are not the step's: a caller looks at gradients."""
        if self._observer is None:
            yield
            return
        self._observer.is_paused = True
        try:
            yield
        finally:
            self._observer.is_paused = False

    @property
    def is_incomplete(self) -> bool:
        """Whether no update was observed yet: the first step of this engine, of a new run or a resumed one."""
        return "master_weights" not in self._found

    @contextmanager
    def watching(self, is_on: bool) -> Iterator[None]:
        if not is_on:
            yield
            return
        observer = self._observer = CollectiveObserver(no_dtypes_of=self._activation_groups)
        with ExitStack() as stack:
            stack.callback(self._probe.register_forward_hook(self._see_block, with_kwargs=True).remove)
            for unit, names in _units_in(self._probe):
                stack.enter_context(innermost_layer(unit, functools.partial(self._see_weights, names)))
            operators = OperatorDtypes(self._add)
            if not self._is_compiled:
                self._look_inside(stack, operators)
            stack.enter_context(OperatorWatch(observer, operators))  # one mode: each costs every operator a call
            yield
        for component, collectives in _COLLECTIVES.items():
            for dtype in {dtype for name in collectives for dtype in observer.dtypes.get(name, ())}:
                if dtype.is_floating_point:  # DDP also all-reduces the set of used parameters
                    self._add(component, dtype)
            for name in observer.formats.get(component, ()):
                self._add(component, name)

    def _look_inside(self, stack: ExitStack, operators: OperatorDtypes) -> None:
        for child in self._probe.children() if self._policy.has_wide_residual else ():
            stack.callback(child.register_forward_hook(self._see_part).remove)
        for router, place in self._routers:
            stack.callback(router.register_forward_hook(functools.partial(self._see_router, place)).remove)
        if self._head is not None:
            stack.callback(self._head.register_forward_hook(self._see_logits).remove)
        without = [router for router, _ in self._routers]
        stack.enter_context(operators.inside_linears(self._probe, without=without))
        stack.enter_context(listening(self._add))

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
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim > 0 and key != EMA:
                    parts = quantised_parts(value)
                    self._add(QUANTISED_STATE if parts else _MOMENTS.get(key, OTHER_STATE), _stored(value))

    def records(self) -> list[DtypeRecord]:
        order = {name: place for place, name in enumerate(COMPONENTS)}
        return [self._record(name) for name in sorted(self._found, key=lambda name: order.get(name, len(order)))]

    def _record(self, component: str) -> DtypeRecord:
        found = tuple(sorted(self._found[component]))
        asked = {QUANTISED_STATE: QUANTISED_DTYPE, OTHER_STATE: self._policy.first_moment}.get(component)
        asked = asked or str(getattr(self._policy, component))
        return DtypeRecord(component=component, asked=asked, found=found, note=self._note(component, asked, found))

    def _note(self, component: str, asked: str, found: tuple[str, ...]) -> str:
        """Why a component that is not as asked is right nevertheless."""
        if found == (asked,):
            return ""
        if asked in LOW_PRODUCTS and asked in found and set(found) <= {asked, self._policy.weights}:
            return "layers that do not multiply in float8"
        if asked == "tf32" and found == ("float32",) and not torch.cuda.is_available():
            return "a CPU has no tf32"
        if component in _OF_THE_MODEL and component not in self._given:
            return "the model's own code"
        return ""

    def _see_weights(self, names: Sequence[tuple[nn.Module, str]], forward: Forward, *args: Any, **kwargs: Any) -> Any:
        for module, name in names:
            if (weight := getattr(module, name)).is_floating_point():  # codes of a frozen base multiply by their values
                self._add("weights", weight.dtype)
        return forward(*args, **kwargs)

    def _see_block(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            if not self._policy.has_wide_residual:  # else those of what is added to it
                self._add("activations", first.dtype)
            self._add("residual", first.dtype)
        if inputs and inputs[0].is_floating_point():
            self._add("residual", inputs[0].dtype)

    def _see_part(self, _module: nn.Module, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            self._add("activations", first.dtype)

    def _see_router(self, place: int | None, _module: nn.Module, _args: Any, output: Any) -> None:
        self._add("router", (output if place is None else output[place]).dtype)

    def _see_logits(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self._add("logits", output.dtype)

    def _add(self, component: str, dtype: torch.dtype | str) -> None:
        self._found.setdefault(component, set()).add(str(dtype).removeprefix("torch.").removesuffix("fn"))


def _stored(state: torch.Tensor) -> torch.dtype:
    parts = quantised_parts(state)
    return parts.codes.dtype if parts else state.dtype


def _head_of(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    try:
        head = find() if callable(find) else None
    except (NotImplementedError, AttributeError):  # models without a head
        return None
    return head if isinstance(head, nn.Module) else None


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
