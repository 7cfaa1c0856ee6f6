"""One rank's stages of a model, whose own forward runs on every stage.

    before the first own block   the model's own code: masks, positions, rotary tables. Embeddings of other stages
                                 return NaN, which is never read: the first own block takes the received tensor instead
    blocks of earlier stages     skipped
    the next stage's first block the forward ends there; the input of that block is sent

So computations around the blocks are right on every stage, and a model that passes its blocks more than the hidden
states of the block before (which no stage receives) ends in NaN, not in wrong numbers. Parameters of other stages are
dropped before any memory is allocated for them. A rank with several stages has one model with all their blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core.errors import PipelineError
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ROOT, ModelLayout
from weft.models.pp.placeholders import (
    BlockPlaceholder,
    NoTable,
    placeholder_like,
    placeholder_output,
    placeholder_tensor,
)
from weft.models.pp.probe import Place
from weft.models.pp.split import PipelineSplit


class StageDone(Exception):  # noqa: N818 - an end, not an error
    """The forward has run the stage's last block; `hidden` is its output."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the stage is done")
        self.hidden = hidden


class Stages:
    """The stages `own` of `split`, on a model with their parameters alone."""

    def __init__(self, model: nn.Module, split: PipelineSplit, own: tuple[int, ...]) -> None:
        self.split, self.own = split, own
        self.received: Tensor | None = None
        self.checked: set[int] = set()  # stages whose first forward succeeded
        self.model = model
        self._places = {stage: self._replacements(stage) for stage in own}
        wrap_forward(model, _return_hidden)

    @property
    def last(self) -> int:
        return self.split.num_stages - 1

    @contextmanager
    def forward_of(self, stage: int, received: Tensor | None) -> Iterator[None]:
        """Inside, the model's forward is that of `stage`."""
        self.received = received
        originals = [(container, key, container._modules[key]) for container, key, _ in self._places[stage]]
        try:
            for container, key, placeholder in self._places[stage]:
                container._modules[key] = placeholder
            yield
        finally:
            for container, key, module in originals:
                container._modules[key] = module
            self.received = None

    def _replacements(self, stage: int) -> list[tuple[nn.Module, str, nn.Module]]:
        """(container, key, replacement) for every block that the stage's forward replaces."""
        own = self.split.stages[stage]
        placeholders: dict[str, nn.Module] = {}
        earlier = [name for blocks in self.split.stages[:stage] for name in blocks]
        for name in (*earlier, *(name for name, home in self.split.beside.items() if home < stage)):
            placeholders[name] = _Skipped(self.model.get_submodule(name), self)
        if stage > 0:
            placeholders[own[0]] = _Entry(self.model.get_submodule(own[0]), self)
        if stage < self.last:
            following = self.split.stages[stage + 1][0]
            placeholders[following] = _Exit(self.model.get_submodule(following), self)
        placed = ((name.rpartition("."), placeholder) for name, placeholder in placeholders.items())
        return [(self.model.get_submodule(owner), key, placeholder) for (owner, _, key), placeholder in placed]


class _StagePlaceholder(BlockPlaceholder):
    """Replaces a block, outside of the block's hooks."""

    def __init__(self, block: nn.Module, stages: Stages) -> None:
        super().__init__(block)
        self.__dict__["stages"] = stages  # not a submodule


class _Skipped(_StagePlaceholder):
    """A block of an earlier stage. It returns NaN, which only the next skipped block reads."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = placeholder_like(_hidden(args, kwargs, self.stages.split.hidden))
        return placeholder_output(output, self.stages.split.num_outputs)


class _Entry(_StagePlaceholder):
    """The first own block takes the received tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place = self.stages.split.hidden
        if isinstance(place, str):
            return self.block(*args, **{**kwargs, place: self.stages.received})
        return self.block(*args[:place], self.stages.received, *args[place + 1 :], **kwargs)


class _Exit(_StagePlaceholder):
    """The next stage's first block: this stage sends the block's input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs, self.stages.split.hidden)
        if not isinstance(hidden, Tensor):
            name = type(self.stages.model).__name__
            raise PipelineError(f"blocks of {name} pass each other more than one tensor", hint="use mesh.pp = 1")
        raise StageDone(hidden)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
    return kwargs[place] if isinstance(place, str) else args[place]


def _return_hidden(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Inside of the model's hooks, which run only if the forward returns."""
    try:
        return forward(*args, **kwargs)
    except StageDone as done:
        return done.hidden


class StageCall:
    """The model as an objective calls it: on any stage but the last it raises `StageDone`, which ends the objective.

    Errors of a stage's first forward become a PipelineError: the model does not suit pipeline parallelism."""

    def __init__(self, module: nn.Module, stages: Stages, stage: int) -> None:
        self.module, self._stages, self._stage = module, stages, stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_new = self._stage > 0 and self._stage not in self._stages.checked
        output = self._first(*args, **kwargs) if is_new else self.module(*args, **kwargs)
        if self._stage == self._stages.last:
            return output
        raise StageDone(output)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output = self.module(*args, **kwargs)
        except (RuntimeError, ValueError, LookupError, AttributeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError | dist.DistError):
                raise
            lines = str(error).strip().splitlines() or [""]
            raise self._unfit(f"does not run ({type(error).__name__}: {lines[0]})") from error
        if read_is_nan(output) and not read_is_nan(self._stages.received):
            raise self._unfit("turns finite hidden states into NaN: it may read values of an earlier stage")
        self._stages.checked.add(self._stage)
        return output

    def _unfit(self, failure: str) -> PipelineError:
        name = type(self._stages.model).__name__
        return PipelineError(f"stage {self._stage} of {name} {failure}", hint="use mesh.pp = 1")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def read_is_nan(output: Any) -> bool:
    """Waits for the device, once per stage. A dry run has no numbers and returns False."""
    tensor = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return isinstance(tensor, Tensor) and bool(tensor.detach().isnan().any())


def drop_other_stages(
    model: nn.Module,
    layout: ModelLayout,
    split: PipelineSplit,
    own: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelLayout:
    """Drop every parameter that `own` stages do not have; returns the layout of the rest."""
    blocks = [name for stage in own for name in split.stages[stage]]
    blocks += split.idle if split.num_stages - 1 in own else ()
    kept: dict[str, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        canonical = layout.ties.get(name, name)
        unit = layout.unit_of[canonical]
        if unit in blocks or (unit == ROOT and split.home(name) in own):
            kept[name] = canonical
        else:
            is_read = unit == ROOT and split.home(name) < split.num_stages - 1
            _drop(model, name, parameter, is_read=is_read, dtype=dtype, device=device)
    for name in {*split.blocks, *split.idle} - set(blocks):
        for module in model.get_submodule(name).modules():
            module._buffers.update(dict.fromkeys(module._buffers))
    return _layout_of(layout, kept, blocks)


def _drop(
    model: nn.Module, name: str, parameter: nn.Parameter, *, is_read: bool, dtype: torch.dtype, device: torch.device
) -> None:
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    module._parameters[key] = None
    if is_read:  # the model's own code reads it on later stages too
        module.__dict__[key] = placeholder_tensor(parameter.shape, dtype=dtype, device=device)
        if isinstance(module, nn.Embedding):
            wrap_forward(module, NoTable(parameter.shape[-1], dtype=dtype, device=device))


def _layout_of(layout: ModelLayout, kept: dict[str, str], blocks: list[str]) -> ModelLayout:
    """A tied weight whose canonical name is on another stage gets its first name here, and an entry in `copies`."""
    first_here: dict[str, str] = {}
    for name, canonical in kept.items():
        if name == canonical or canonical not in kept:
            first_here.setdefault(canonical, name)
    return replace(
        layout,
        blocks=tuple(blocks),
        ties={name: first_here[canonical] for name, canonical in kept.items() if name != first_here[canonical]},
        unit_of={name: layout.unit_of[canonical] for canonical, name in first_here.items()},
        copies={name: canonical for canonical, name in first_here.items() if name != canonical},
    )
