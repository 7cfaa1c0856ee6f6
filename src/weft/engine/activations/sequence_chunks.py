"""The MLP of each block in chunks of positions, so that the inner activations of one chunk exist at a time.

    forward    for each chunk [rows, N, width]: gate, up, down; saved: the chunk's input
    backward   for each chunk, last first: its forward again, then its gradients

A layer around the MLP's forward, outside of all layers of other axes. Within a recomputed block chunks bound the
recomputed forward too. Dropout has the masks of the whole row. Without gradients (evaluation) chunks bound the forward.
Weight gradients of chunks are added in the compute dtype: many chunks in 16 bits round more than few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.core.errors import ModelError, NotBuiltError
from weft.engine.activations.dropout import is_drawing, part_of_rows, replayed
from weft.engine.activations.recomputing import entered, recomputing
from weft.engine.activations.slices import PositionChunk
from weft.engine.objective import is_hugging_face
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ModelLayout
from weft.models.mlps import OFF, find_mlps, refusal

Place = tuple[nn.Module, str]  # a parameter: its module and its name there


def find_chunked(model: nn.Module, layout: ModelLayout, *, size: int) -> dict[str, tuple[str, ...]]:
    """MLPs to chunk by block of the full model; nothing if `size` is 0. Refuses a model that has others."""
    if not size:
        return {}
    if not is_hugging_face(model):
        name = type(model).__name__
        raise NotBuiltError(f"activations.sequence_chunk needs a Hugging Face model, not {name}", hint=OFF)
    mlps = find_mlps(model, layout)
    if refused := refusal(model, mlps):
        raise ModelError(refused[0], hint=refused[1])
    return mlps


def apply_sequence_chunks(
    model: nn.Module, mlps: Mapping[str, Sequence[str]], *, size: int, own: Collection[str]
) -> None:
    """Wrap the MLPs of this rank's blocks, as outermost layer so far."""
    for name in (name for block, names in mlps.items() if block in own for name in names):
        module = model.get_submodule(name)
        wrap_forward(module, _Chunked(module, name, size))


class _Chunked:
    """The layer around one MLP."""

    def __init__(self, module: nn.Module, name: str, size: int) -> None:
        self._name, self._size = name, size
        self._places: list[Place] = [(owner, key) for owner in module.modules() for key in owner._parameters]

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        hidden = next((value for value in values if isinstance(value, Tensor)), None)
        if hidden is None or hidden.ndim != 3:
            raise NotBuiltError(
                f"activations.sequence_chunk: {self._name} gets no hidden states [rows, positions, width]", hint=OFF
            )
        length = hidden.shape[1]
        if length <= self._size:
            return forward(*args, **kwargs)
        split = [_Split(value, hidden.shape[:2], self._size) for value in values]
        casts = [(owner, key) for owner, key in self._places if _is_cast(owner._parameters[key])]
        state = torch.get_rng_state() if is_drawing() else None
        outputs = []
        for index, first in enumerate(range(0, length, self._size)):
            part = PositionChunk(first, min(self._size, length - first), length)
            call = _ChunkForward(forward, len(args), tuple(kwargs), casts, part)
            if state is not None:  # every chunk takes its part of the same masks
                torch.set_rng_state(state)
            outputs.append(_once_more(call, [each.at(index) for each in split]))
        return torch.cat(outputs, 1)


class _Split:
    """Chunks of an argument, if it has a value per position."""

    def __init__(self, value: Any, rows_and_length: torch.Size, size: int) -> None:
        has_positions = isinstance(value, Tensor) and value.shape[:2] == rows_and_length
        self._value, self._chunks = value, value.split(size, 1) if has_positions else None

    def at(self, index: int) -> Any:
        return self._value if self._chunks is None else self._chunks[index]


class _ChunkForward:
    """The forward of one chunk: of its arguments and of the parameters that are casts during the block's forward.

    A chunk is computed again when the block's forward has put its parameters back: so casts are arguments, which
    autograd saves, and a recomputed block does not keep.
    """

    def __init__(
        self, forward: Forward, num_args: int, keys: tuple[str, ...], casts: list[Place], part: PositionChunk
    ) -> None:
        self._forward, self._num_args, self._keys = forward, num_args, keys
        self.casts, self._part = casts, part

    def __call__(self, *given: Any) -> Any:
        num_values = self._num_args + len(self._keys)
        # GPT-2's Conv1D views rows as one: a chunk of several rows is copied, in both forwards
        given = tuple(value.contiguous() if isinstance(value, Tensor) else value for value in given)
        args, named, casts = given[: self._num_args], given[self._num_args : num_values], given[num_values:]
        with _in_place(self.casts, casts), part_of_rows(self._part):
            return self._forward(*args, **dict(zip(self._keys, named, strict=True)))


def _once_more(call: _ChunkForward, values: list[Any]) -> Any:
    """`call`, of which the backward keeps the arguments alone."""
    casts = [owner._parameters[key] for owner, key in call.casts]
    if not torch.is_grad_enabled():
        return call(*values, *casts)
    return checkpoint(call, *values, *casts, use_reentrant=False, context_fn=_contexts)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), entered(recomputing(), replayed())


def _is_cast(parameter: Tensor | None) -> bool:
    return parameter is not None and not isinstance(parameter, nn.Parameter)


@contextmanager
def _in_place(places: Sequence[Place], casts: Sequence[Tensor]) -> Iterator[None]:
    before = [owner._parameters[key] for owner, key in places]
    try:
        for (owner, key), cast in zip(places, casts, strict=True):
            owner._parameters[key] = cast  # type: ignore[assignment]
        yield
    finally:  # recomputation ends with an exception
        for (owner, key), value in zip(places, before, strict=True):
            owner._parameters[key] = value
