"""Runs a model's forward with placeholders for its blocks, to find the tensors that a pipeline has to send.

No block runs, and parameters around the blocks have no values. The probes:

    trace_forward   finds the order of the blocks, the argument with the hidden states, and after how many blocks
                    each other parameter is used. The order of definition is not enough: OPT defines its final norm
                    before its blocks
    require_stage   runs the forward of one stage. Parameters and block outputs of earlier stages are NaN; only the
                    first own block's hidden states are received. NaN in any other place means a value that
                    no stage sends

Modules between blocks in an nn.Sequential do not run either. A model that takes no token ids is run on floats. All
ranks run the same probes, so all of them refuse a model, or none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.layout import ROOT, ModelLayout
from weft.models.pp.chain import beside_blocks
from weft.models.pp.placeholders import (
    BlockPlaceholder,
    NoTable,
    noted,
    placeholder_like,
    placeholder_output,
    placeholder_tensor,
    tensors_in,
    unchanged,
)

PROBE_TOKENS = 4
MAX_OUTPUTS = 4
MAX_WIDTHS = 4
MAX_LETTERS = 120  # of the model's own error message
HIDDEN = "hidden_states"
Place = int | str  # an argument's position or its name


class UnfitError(Exception):
    """The reason why the model cannot be split, as a clause about it ("it ...")."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """`order`: blocks in the order of calls. `uses`: after how many blocks each parameter outside of them is used."""

    order: tuple[str, ...]
    uses: dict[str, frozenset[int]]
    hidden: Place
    num_outputs: int  # size of a block's output tuple; 0: a tensor, the hidden states
    beside: dict[str, int] = field(default_factory=dict)  # modules between blocks -> number of blocks before them
    fed: tuple[int, ...] = ()  # shape of the float input; (): token ids


@dataclass(frozen=True, kw_only=True)
class ProbeView:
    """A stage: blocks `begin` to `end` in the order of the forward; `lost`: parameters of earlier stages."""

    begin: int
    end: int
    lost: frozenset[str]


def trace_forward(model: nn.Module, layout: ModelLayout) -> Trace:
    """Trace the forward; raises UnfitError if it does not suit any pipeline.

    A model that takes no token ids is run on floats, of the input widths of its own layers."""
    try:
        return _trace(model, layout, fed=())
    except _NotEnteredError:
        for fed in _shapes_of_floats(model, layout):
            with suppress(_NotEnteredError):
                return _trace(model, layout, fed=fed)
        raise


def _trace(model: nn.Module, layout: ModelLayout, *, fed: tuple[int, ...]) -> Trace:
    """Trace with growing sizes of the blocks' output tuples until the model's code accepts one."""
    for num_outputs in range(MAX_OUTPUTS):
        try:
            return _Probe(model, layout, num_outputs=num_outputs, fed=fed).run()
        except _OtherOutputError:
            continue
    return _Probe(model, layout, num_outputs=MAX_OUTPUTS, fed=fed).run()


def _shapes_of_floats(model: nn.Module, layout: ModelLayout) -> list[tuple[int, ...]]:
    """Float input shapes, 2-D and 3-D, for each input width of the linear layers outside the blocks."""
    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and layout.unit_of.get(f"{name}.weight") == ROOT
    ]
    widths = list(dict.fromkeys(linear.in_features for linear in linears))
    return [shape for width in widths[:MAX_WIDTHS] for shape in ((PROBE_TOKENS, width), (1, PROBE_TOKENS, width))]


def require_stage(model: nn.Module, layout: ModelLayout, trace: Trace, view: ProbeView) -> None:
    """Raise UnfitError if a stage would compute with values that it does not have."""
    _Probe(model, layout, num_outputs=trace.num_outputs, fed=trace.fed, view=view).run()


class _OtherOutputError(UnfitError):
    """The model expects another output of a block than the placeholder's."""


class _NotEnteredError(UnfitError):
    """The model fails before its first block."""


class _EndError(Exception):
    """The forward has reached the stage's end, or the output head, whose matmul is not needed."""


class _Probe:
    """One run of the forward. `view`: the stage to check; None: no check, parameters are all NaN."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        *,
        num_outputs: int,
        fed: tuple[int, ...],
        view: ProbeView | None = None,
    ) -> None:
        self.model, self.layout, self.num_outputs, self.fed, self.view = model, layout, num_outputs, fed, view
        self.order: list[str] = []
        self.uses: dict[str, set[int]] = {}
        self.beside: dict[str, int] = {}
        self.hidden: Place | None = None
        self.output: Tensor | None = None
        self._looked: dict[int, tuple[Tensor, bool]] = {}

    def run(self) -> Trace:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(self.model), self._at_head():
                device = _device_of(self.model)
                self._place_values(device)
                self._place_blocks()
                ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=device)
                fed = torch.zeros(self.fed, device=device) if self.fed else ids
                keywords = {"use_cache": False} if hasattr(self.model, "config") else {}
                self._look_at_end(self.model(fed, **keywords))
        except _EndError:
            pass
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            self._explain(error)
        if not self.order or self.hidden is None:
            raise UnfitError(f"its forward does not call {self.layout.blocks[0]}")
        uses = {name: frozenset(times) for name, times in self.uses.items()}
        return Trace(
            order=tuple(self.order),
            uses=uses,
            hidden=self.hidden,
            num_outputs=self.num_outputs,
            beside=self.beside,
            fed=self.fed,
        )

    def _explain(self, error: Exception) -> None:
        if len(self.order) == len(self.layout.blocks):
            return  # modules after the blocks are all on one stage; placeholders may return other shapes than blocks
        what = f"({type(error).__name__}: {_first_line(error)})"
        if self.view is not None:
            raise UnfitError(f"a later stage does not run without the embeddings of the first {what}") from error
        if not self.order:
            raise _NotEnteredError(f"its forward does not run on {PROBE_TOKENS} token ids only {what}") from error
        where = f"after {self.order[-1]}, when that returns hidden states only"
        raise _OtherOutputError(f"its forward does not run {where} {what}") from error

    def arrive(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of a block and return a placeholder output."""
        if name in self.order:
            raise UnfitError(f"it runs {name} more than once")
        place = place_of_hidden(args, kwargs)
        if place is None or self.hidden not in (None, place):
            raise UnfitError(f"it does not call {name} with hidden states as it calls its other blocks")
        self.hidden = place
        hidden = kwargs[place] if isinstance(place, str) else args[place]
        if _is_first_of(hidden, self.output):
            raise _OtherOutputError("it takes a part of a block's output")
        is_own = self.view is None or self.view.begin <= len(self.order)
        if self.view is not None and is_own:
            self._look_at_arguments(name, block, args, kwargs, self.view)
        self.order.append(name)
        self.output = _finite_like(hidden) if is_own else placeholder_like(hidden)
        return placeholder_output(self.output, self.num_outputs, number=1.0 if is_own else float("nan"))

    def pass_by(self, name: str, module: nn.Module) -> None:
        """Record the call of a module between blocks: one tensor in, one out, and its parameters are used here."""
        self.beside[name] = len(self.order)
        for key, _ in module.named_parameters(remove_duplicate=False):
            self._used(f"{name}.{key}")

    def _look_at_arguments(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], view: ProbeView
    ) -> None:
        named: dict[Place, Any] = dict(enumerate(args))
        named.update(kwargs)
        marked = [place for place, value in named.items() if any(map(self._has_nan, tensors_in(value)))]
        others = [_argument_name(block, place) for place in marked if place != self.hidden]
        if others:
            raise UnfitError(f"its block {name} also takes {others[0]}, which stages do not send each other")
        if self.hidden in marked and len(self.order) > view.begin:
            raise UnfitError(f"its hidden states for {name} use more than the previous block's output")
        if len(self.order) == view.end:  # the next stage's first block
            raise _EndError

    def _look_at_end(self, output: Any) -> None:
        if self.view and any(map(self._has_nan, tensors_in(_logits_of(output)))):
            raise UnfitError("after its blocks it uses more than the last block's output")

    def _has_nan(self, tensor: Tensor) -> bool:
        """Whether the tensor has NaN; cached, since blocks share masks and positions."""
        if id(tensor) not in self._looked:
            self._looked[id(tensor)] = (tensor, tensor.is_floating_point() and bool(tensor.isnan().any()))
        return self._looked[id(tensor)][1]

    def _place_blocks(self) -> None:
        for name in self.layout.blocks:
            owner, _, key = name.rpartition(".")
            block = self.model.get_submodule(name)
            self.model.get_submodule(owner)._modules[key] = _ProbePlaceholder(block, name, self)
        for name in beside_blocks(self.model, self.layout):
            owner, _, key = name.rpartition(".")
            module = self.model.get_submodule(name)
            self.model.get_submodule(owner)._modules[key] = _InLinePlaceholder(module, name, self)

    def _place_values(self, device: torch.device) -> None:
        """Replace parameters outside the blocks by NaN or one, without memory, and record their use."""
        for name, value in list(self.model.named_parameters(remove_duplicate=False)):
            if self.layout.unit_of[self.layout.ties.get(name, name)] == ROOT:
                owner, _, key = name.rpartition(".")
                number = float("nan") if self.view is None or name in self.view.lost else 1.0
                plain = placeholder_tensor(value.shape, dtype=value.dtype, device=device, number=number)
                module = self.model.get_submodule(owner)
                module.__dict__[key] = noted(plain, partial(self._used, name))
                if self.view is not None and name in self.view.lost and isinstance(module, nn.Embedding):
                    lookup = NoTable(value.shape[-1], dtype=value.dtype, device=device)
                    module.__dict__["forward"] = partial(lookup, module.forward)

    @contextmanager
    def _at_head(self) -> Iterator[None]:
        def look(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.order:
                self._look_at_end(args)
                raise _EndError

        head = _head_of(self.model)
        hook = head.register_forward_pre_hook(look) if head is not None else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _used(self, name: str) -> None:
        self.uses.setdefault(name, set()).add(len(self.order))


class _ProbePlaceholder(BlockPlaceholder):
    def __init__(self, block: nn.Module, name: str, runner: _Probe) -> None:
        super().__init__(block)
        self.__dict__.update(block_name=name, runner=runner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.arrive(self.block_name, self.block, args, kwargs)


class _InLinePlaceholder(_ProbePlaceholder):
    """A placeholder between blocks of an nn.Sequential."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.runner.pass_by(self.block_name, self.block)
        return args[0]


def place_of_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Place | None:
    if isinstance(kwargs.get(HIDDEN), Tensor):
        return HIDDEN
    return 0 if args and isinstance(args[0], Tensor) else None


def _is_first_of(hidden: Tensor, output: Tensor | None) -> bool:
    """Whether `hidden` is `output[0]`."""
    return output is not None and hidden.data_ptr() == output.data_ptr() and hidden.shape == output.shape[1:]


def _finite_like(hidden: Tensor) -> Tensor:
    """Finite values, not all equal: a norm divides by their deviation."""
    dtype = hidden.dtype if hidden.is_floating_point() else torch.get_default_dtype()
    return torch.linspace(-1.0, 1.0, hidden.numel(), device=hidden.device).view(hidden.shape).to(dtype)


def _argument_name(block: nn.Module, place: Place) -> str:
    names = list(inspect.signature(block.forward).parameters)
    return place if isinstance(place, str) else names[min(place, len(names) - 1)]


def _logits_of(output: Any) -> Any:
    return getattr(output, "logits", output)


def _head_of(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return head if isinstance(head, nn.Module) else None


def _device_of(model: nn.Module) -> torch.device:
    devices = [value.device for value in model.parameters() if value.device.type != "meta"]
    return devices[0] if devices else torch.device("cpu")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].partition(". ")[0][:MAX_LETTERS]
