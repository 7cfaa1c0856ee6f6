"""One-dimensional tensor parallelism: layers around modules, without changes inside them.

    a region      entry: replicated, gradient all-reduced            exit: partial sums all-reduced, bias added once
    with sequence parallel    entry: all-gather of the sequence      exit: reduce-scatter of it
    embedding     zeros for tokens of other ranks, then all-reduce   head: logits of the local vocabulary slice

So a block costs two all-reduces forward and two backward, or all-gathers and reduce-scatters of the same volume.
Model code is unchanged: it sees fewer heads and narrower matrices.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import TensorParallelError
from weft.engine import collectives
from weft.engine.tp.activation_layout import ActivationLayout
from weft.engine.tp.grid import TP_GROUP, Grid
from weft.engine.tp.one_d_shards import local_units
from weft.engine.tp.statistics import spanning
from weft.engine.wrap_forward import Forward, Layer, wrap_forward
from weft.models.adapter.lora import Adapted
from weft.models.layout import ModelLayout
from weft.models.tp.layout import Region, TensorLayout


def apply_one_d(
    model: nn.Module,
    layout: ModelLayout,
    tensors: TensorLayout,
    grid: Grid,
    activations: ActivationLayout,
    *,
    loss_parallel: bool,
) -> None:
    """Wrap the modules of a model with sharded parameters in the layers of one-dimensional tensor parallelism."""
    for region in tensors.regions:
        _Passage(region, grid, activations).apply(model)
        for norm in region.wide_norms:
            module, width = model.get_submodule(norm.name), sum(segment.features for segment in norm.segments)
            own_width = sum(local_units(segment, grid.degree) * segment.size for segment in norm.segments)
            copies = own_width * grid.degree // width
            wrap_forward(module, spanning(module, grid.group(TP_GROUP), width, copies=copies))
        set_sizes(model.get_submodule(region.name), region, grid.degree)
    if tensors.embedding is not None:
        table = model.get_submodule(tensors.embedding)
        wrap_forward(table, _Table(table, grid))
    if tensors.head is not None:
        wrap_forward(
            model.get_submodule(tensors.head),
            _Head(grid, vocabulary=num_tokens(model, tensors.head), gathers_logits=not loss_parallel),
        )
    for name in layout.blocks:
        wrap_forward(model.get_submodule(name), _outside_regions(activations))
    if activations.sequence_parallel:
        _apply_sequence_parallel(model, layout, tensors, grid, activations)


class _Passage:
    """Entry and exit of a region."""

    def __init__(self, region: Region, grid: Grid, activations: ActivationLayout) -> None:
        self.region, self.activations = region, activations
        self.group = grid.group(TP_GROUP)
        self.entered: tuple[Tensor, Tensor] | None = None  # the last input, and the full input of the region
        self.reads_left = 0

    def apply(self, model: nn.Module) -> None:
        for name in self.region.entries:
            wrap_forward(
                model.get_submodule(name), self.enter_all if self.region.kind == "experts" else self.enter_first
            )
        for linear in self.region.linears:
            module = model.get_submodule(linear.name)
            _set_features(module)
            if linear.side == "row":
                wrap_forward(module, _Row(module, self, is_transposed=linear.is_transposed))
        if self.region.leaves_at is not None:
            wrap_forward(model.get_submodule(self.region.leaves_at), self.leave_from)

    def enter_first(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The hidden states are the argument of that name, or the first one; other occurrences are replaced too."""
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        made = self._enter(hidden)  # CTRL passes its attention the same tensor three times: each must be summed
        args = tuple(made if value is hidden else value for value in args)
        kwargs = {key: made if value is hidden else value for key, value in kwargs.items()}
        self.activations.enter()
        return forward(*args, **kwargs)

    def enter_all(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Experts take tokens with their routing indices and weights: all of them have one row per token."""
        self.activations.enter()
        made = [self._full_input(value) if isinstance(value, Tensor) else value for value in args]
        named = {key: self._full_input(value) if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        return forward(*made, **named)

    def leave_from(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        return self.leave(forward(*args, **kwargs))

    def leave(self, partial: Tensor) -> Tensor:
        # linears that read the same input (gate and up) share its entry until the exit
        self.entered = None
        self.activations.leave()
        if not self.activations.sequence_parallel:
            return collectives.leave(partial, self.group)
        return collectives.scatter(partial, self.group, sequence_dim(partial))

    def _enter(self, x: Tensor) -> Tensor:
        """Once for all entries that read the same tensor, then freed.

        Recompute stops before the exit: a tensor held until there would keep the recomputed block alive.
        """
        if self.entered is None or self.entered[0] is not x:
            self.entered, self.reads_left = (x, self._full_input(x)), len(self.region.entries)
        made = self.entered[1]
        self.reads_left -= 1
        if self.reads_left == 0:
            self.entered = None
        return made

    def _full_input(self, x: Tensor) -> Tensor:
        if self.activations.sequence_parallel:
            return (
                collectives.gather(x, self.group, sequence_dim(x))
                if x.is_floating_point()
                else collectives.gathered(x, self.group, sequence_dim(x))
            )
        return collectives.enter(x, self.group) if x.is_floating_point() else x


class _Row:
    """A linear with sharded inputs: its output is a partial sum; the bias is added to the sum, once."""

    def __init__(self, module: Any, passage: _Passage, *, is_transposed: bool) -> None:
        self.module, self.passage, self.is_transposed = module, passage, is_transposed

    def __call__(self, _forward: Forward, x: Tensor) -> Tensor:
        bias = self.module.bias
        partial = self._product(x)
        if isinstance(self.module, Adapted):  # its rank of A has the local inputs: a partial sum too
            partial = partial + self.module.adapter_delta(x)
        total = self.passage.leave(partial)
        return total if bias is None else total + bias

    def _product(self, x: Tensor) -> Tensor:
        own = getattr(self.module, "product", None)  # in float8
        if own is not None:
            return own(x)  # type: ignore[no-any-return]
        weight = self.module.weight
        return x @ weight if self.is_transposed else F.linear(x, weight)


class _Table:
    """An embedding with this rank's rows: tokens of other ranks are zeros until the sum."""

    def __init__(self, module: Any, grid: Grid) -> None:
        self.group = grid.group(TP_GROUP)
        rows = module.weight.shape[0]
        self.first = grid.rank * -(-int(module.num_embeddings) // grid.degree)
        self.rows = rows
        padding = module.padding_idx
        module.num_embeddings = rows
        if padding is not None:
            module.padding_idx = padding - self.first if 0 <= padding - self.first < rows else None

    def __call__(self, forward: Forward, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = ids - self.first
        is_elsewhere = (own < 0) | (own >= self.rows)
        found = forward(own.masked_fill(is_elsewhere, 0), *args, **kwargs)
        return collectives.leave(found.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.group)


class _Head:
    """The output head over this rank's vocabulary slice; `gathers_logits` gathers the slices."""

    def __init__(self, grid: Grid, *, vocabulary: int, gathers_logits: bool) -> None:
        self.group, self.gathers_logits, self.vocabulary = grid.group(TP_GROUP), gathers_logits, vocabulary
        self.chunk = -(-vocabulary // grid.degree)

    def __call__(self, forward: Forward, x: Tensor) -> Tensor:
        logits = forward(collectives.enter(x, self.group))
        if not self.gathers_logits:
            return logits  # type: ignore[no-any-return]
        padded = F.pad(logits, (0, self.chunk - logits.shape[-1]))
        return collectives.collect(padded, self.group, padded.ndim - 1)[..., : self.vocabulary]


class _SequenceParallel:
    """Sequence parallel: from the first block's entry to the last one's exit a rank has a slice of the sequence."""

    def __init__(self, grid: Grid, activations: ActivationLayout) -> None:
        self.group, self.activations, self.degree = grid.group(TP_GROUP), activations, grid.degree

    def begin(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_first(args, kwargs, self._take)
        self.activations.begin()
        return forward(*args, **kwargs)

    def end(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        self.activations.end()
        return _of_first(output, lambda hidden: collectives.collect(hidden, self.group, 1))

    def around_mixer(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Every rank runs the module on the full sequence, and keeps its slice of the output."""
        args, kwargs = _with_first(args, kwargs, lambda x: collectives.gather(x, self.group, 1))
        self.activations.end()
        output = forward(*args, **kwargs)
        self.activations.begin()
        return _of_first(output, lambda hidden: collectives.own_slice(hidden, self.group, 1))

    def _take(self, hidden: Tensor) -> Tensor:
        if hidden.shape[1] % self.degree:
            raise TensorParallelError(
                f"a sequence of {hidden.shape[1]} does not divide over {self.degree} tensor-parallel ranks",
                hint="choose a data.sequence_length that divides, or set tensor_parallel.sequence_parallel = false",
            )
        return collectives.take(hidden, self.group, 1)


def sequence_dim(x: Tensor) -> int:
    """[rows, sequence, …], or flattened tokens: a gather changes their order and the scatter restores it."""
    return 1 if x.ndim >= 3 else 0


def set_sizes(module: nn.Module, region: Region, degree: int) -> None:
    """Set the numbers of heads that a module uses in its reshapes to those of this rank."""
    if region.heads is None:
        return
    heads = local_units(region.heads, degree)
    kv_heads = local_units(region.kv_heads or region.heads, degree)
    head_dim, kv_dim = region.heads.size, (region.kv_heads or region.heads).size
    values = {
        "heads": heads,
        "kv_heads": kv_heads,
        "heads_per_kv": heads // kv_heads,
        "width": heads * head_dim,
        "kv_width": kv_heads * kv_dim,
    }
    for attribute, quantity in region.attributes.items():
        owner, _, key = attribute.rpartition(".")
        if owner:
            # a copy: other modules read the same config
            setattr(module, owner, copy.copy(getattr(module, owner)))
        setattr(getattr(module, owner) if owner else module, key, values[quantity])


def _outside_regions(activations: ActivationLayout) -> Layer:
    """A block begins outside of regions: recompute of the block before may have ended in the middle of one."""

    def begin(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        activations.leave()
        return forward(*args, **kwargs)

    return begin


def _apply_sequence_parallel(
    model: nn.Module, layout: ModelLayout, tensors: TensorLayout, grid: Grid, activations: ActivationLayout
) -> None:
    stream = _SequenceParallel(grid, activations)
    for name in tensors.mixers:
        wrap_forward(model.get_submodule(name), stream.around_mixer)
    wrap_forward(model.get_submodule(layout.blocks[0]), stream.begin)
    wrap_forward(model.get_submodule(layout.blocks[-1]), stream.end)


def num_tokens(model: nn.Module, name: str) -> int:
    """Tokens of the full vocabulary: a linear's out_features does not change when its weight is sharded."""
    return int(model.get_submodule(name).out_features)  # type: ignore[arg-type]


def _set_features(module: Any) -> None:
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif hasattr(module, "nf"):  # Conv1D's own reshape
        module.nf = module.weight.shape[1]


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the hidden states, by name or first, changed."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    return (change(args[0]), *args[1:]), kwargs


def _of_first(output: Any, change: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return change(output)
    return (change(output[0]), *output[1:])
