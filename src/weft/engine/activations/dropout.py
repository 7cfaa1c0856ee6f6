"""Dropout that depends on (seed, step, global row) and not on the layout.

torch draws one mask per micro-batch, so the masks of its rows change with the layout. Here the default generator,
seeded alike on every rank, only numbers the dropout calls; each row's mask comes from (call number, global row).
Replaying a forward with the generator's saved state, inside `replayed` (activation recompute), draws the same masks.
A rank with a slice of a tensor (`slices.py`: heads, a width, positions) draws the full mask and takes its slice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from weft.core.errors import NotBuiltError
from weft.engine.activations.slices import (
    HEADS,
    KEYS,
    QUERIES,
    AttentionSlices,
    PositionChunk,
    Sliced,
    Slices,
    full_shape,
    place,
    take,
)
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ModelLayout
from weft.models.seeds import seed_generators


def draw_call_number() -> int:
    """The next number of the default generator, which is seeded alike on every rank."""
    return int(torch.randint(2**62, ()).item())


def uses_randomness(model: nn.Module) -> bool:
    """Whether any module drops or jitters: nn.Dropout, or an attribute such as attention_dropout above zero."""
    return any(_is_random(module) for module in model.modules())


@contextmanager
def seeded_forward(
    *, seed: int, step: int, first_row: int, num_rows: int, is_random: bool, slices: Slices | None = None
) -> Iterator[None]:
    """The randomness of one micro-batch: rows from `first_row` on of the global batch of `step`."""
    if not is_random:
        yield
        return
    rows = _RowDropout(seed=_mix(seed, step), first_row=first_row, num_rows=num_rows, slices=slices)
    seed_generators(rows.seed)
    with rows.drawing():
        yield


def number_blocks(model: nn.Module, layout: ModelLayout) -> None:
    """Restart the count of dropout calls in every block: a pipeline stage skips blocks and must count alike."""
    for index, name in enumerate(layout.blocks):
        wrap_forward(model.get_submodule(name), _Numbered(index))


class _Numbered:
    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if _RowDropout.active is not None:
            _RowDropout.active.begin_block(self.index)
        return forward(*args, **kwargs)


def is_drawing() -> bool:
    """Whether a seeded forward runs, of a model with dropout."""
    return _RowDropout.active is not None


def replayed() -> AbstractContextManager[Any]:
    """The context in which a backward must repeat the forward that is running now."""
    return _RowDropout.active.drawing() if _RowDropout.active is not None else nullcontext()


@contextmanager
def part_of_rows(part: PositionChunk) -> Iterator[None]:
    """The forward inside computes these positions of each row: masks are the row's, and it takes its part of them."""
    rows = _RowDropout.active
    if rows is None:
        yield
        return
    before, rows.part = rows.part, part
    try:
        yield
    finally:
        rows.part = before


def repeated_in_backward(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which the backward keeps the arguments alone. Not for blocks, which set up their slices."""
    rows = _RowDropout.active
    if rows is None:
        return function(*args)
    again = rows.from_here()
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again.drawing()))


# Random functions whose first argument has the rows in dimension 0. Called per row, with the row's seed.
_ROW_BY_ROW = frozenset(
    {
        F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu, F.gumbel_softmax,
        torch.alpha_dropout, torch.bernoulli, torch.rand_like, torch.randn_like,
        torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_,
        torch.Tensor.exponential_,
    }
)  # fmt: skip


class _RowDropout(TorchFunctionMode):
    """Replaces dropout, attention dropout and other noise by row-wise draws."""

    active: ClassVar[_RowDropout | None] = None  # torch turns the mode off in backward; `replayed` turns it on again

    def __init__(self, *, seed: int, first_row: int, num_rows: int, slices: Slices | None = None) -> None:
        super().__init__()
        self.seed = seed
        self._passes: Counter[int] = Counter()
        self.first_row = first_row
        self.num_rows = num_rows
        self.slices = slices
        self.part: PositionChunk | None = None  # of each row, which the forward computes now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _ROW_BY_ROW and kwargs.get("generator") is None:
            return self._row_by_row(func, *args, **kwargs)
        return func(*args, **kwargs)

    def begin_block(self, index: int) -> None:
        """A block that runs several times draws other numbers each time; recomputed, those of its last run."""
        # Private: torch has no public way to ask whether a backward is running; checkpoint itself uses this.
        # tests/unit/engine/activations/test_dropout.py fails when it moves.
        is_repeating = torch._C._current_graph_task_id() != -1
        self._passes[index] += not is_repeating
        seed_generators(_mix(_mix(self.seed, index + 1), self._passes[index]))

    def from_here(self) -> _RowDropout:
        """The same draws, when layers around modules do not run before them."""
        slices = self.slices.snapshot() if self.slices is not None else None
        return _RowDropout(seed=self.seed, first_row=self.first_row, num_rows=self.num_rows, slices=slices)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        training = kwargs.pop("train", training)  # torch.dropout's name for it
        if not training or p == 0.0:
            return input
        if p == 1.0:
            return input * 0.0
        keep = 1.0 - p
        return input * self._mask(input, keep).div_(keep)

    def _mask(self, input: torch.Tensor, keep: float) -> torch.Tensor:
        """Ones and zeros per element of `input`: its slice of the full tensor's mask."""
        generator = torch.Generator(device=input.device)
        parts = []
        for row, part in self._rows(input):
            generator.manual_seed(row)
            slices = self._slices_of(part)
            # new_empty, not empty_like: numbers are drawn in memory order, which must not be a transposed tensor's
            mask = part.new_empty(full_shape(part.shape, slices)).bernoulli_(keep, generator=generator)
            parts.append(take(mask, slices))
        return torch.cat(parts)

    def _slices_of(self, part: torch.Tensor) -> Sequence[Sliced]:
        """`part`: of one row, [1, positions, …], or its flattened tokens."""
        own: list[Sliced] = [(1 if part.ndim > 2 else 0, self.part)] if self.part is not None else []
        return [*own, *self.slices.of(full_shape(part.shape, own))] if self.slices is not None else own

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if dropout_p == 0.0:
            return _attend(query, key, value, attn_mask, dropout_p, *args, **kwargs)
        if kwargs.pop("enable_gqa", False):  # kernels for shared keys draw other masks than those for repeated ones
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        has_rows = attn_mask is not None and attn_mask.ndim == query.ndim and attn_mask.shape[0] == query.shape[0]
        masks = self._split(attn_mask) if attn_mask is not None and has_rows else [attn_mask] * self.num_rows
        outputs = []
        for (seed, part), key_part, value_part, mask in zip(
            self._rows(query), self._split(key), self._split(value), masks, strict=True
        ):
            with _seeded(seed, query.device):
                outputs.append(self._attend_row(part, key_part, value_part, mask, dropout_p, *args, **kwargs))
        return torch.cat(outputs)

    def _attend_row(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one row. A fused kernel draws its mask for the heads and queries it gets, from the first on.

        So a rank with some of them runs the kernel for all, the others zero: it repeats their work, and has the mask
        of the full tensor with every kernel.
        """
        slices = self.slices.in_attention(query.shape) if self.slices is not None else AttentionSlices()
        if not any(slices):
            return _attend(query, key, value, attn_mask, *args, **kwargs)
        heads = [(HEADS, each) for each in slices.heads]
        queries = [*heads, *((QUERIES, each) for each in slices.queries)]
        keys = [*heads, *((QUERIES, each) for each in slices.keys)]
        if attn_mask is not None:
            attn_mask = _full_attention_mask(attn_mask, query, key, slices)
        full = _attend(place(query, queries), place(key, keys), place(value, keys), attn_mask, *args, **kwargs)
        return take(full, queries)

    def _row_by_row(self, func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.ndim == 0 or not kwargs.get("training", True):
            return func(input, *args, **kwargs)  # one number for all rows: alike on every rank already
        is_in_place = func.__name__.endswith("_")
        outputs = []
        for seed, part in self._rows(input):
            slices = self._slices_of(part)
            with _seeded(seed, input.device):
                own = take(func(place(part, slices), *args, **kwargs), slices)
            outputs.append(part.copy_(own) if is_in_place and slices else own)
        return input if is_in_place else torch.cat(outputs)

    def _rows(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(seed, part) of every row of the micro-batch; flattened tokens belong to rows in order."""
        if tensor.ndim == 0 or tensor.shape[0] % self.num_rows:
            raise NotBuiltError(
                f"dropout on a tensor of shape {tuple(tensor.shape)} cannot be assigned to {self.num_rows} rows",
                hint="set the model's dropout to 0 in [model.config]",
            )
        call = draw_call_number()
        return [(_mix(call, self.first_row + index), part) for index, part in enumerate(self._split(tensor))]

    def _split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(tensor, tensor.shape[0] // self.num_rows)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """The mode, with the two main functions also replaced by name: torch turns modes off inside its composite
        functions (nn.MultiheadAttention's), and their replacements are no torch functions."""
        saved, before = (F.dropout, F.scaled_dot_product_attention), _RowDropout.active
        F.dropout, F.scaled_dot_product_attention = self._dropout, self._attention
        _RowDropout.active = self
        try:
            with self:
                yield
        finally:
            F.dropout, F.scaled_dot_product_attention = saved
            _RowDropout.active = before


_attend = F.scaled_dot_product_attention


def _is_random(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return True
    return any(
        isinstance(value, float | int) and not isinstance(value, bool) and value > 0
        for key, value in vars(module).items()
        if "drop" in key or "jitter" in key
    )


def _full_attention_mask(
    own: torch.Tensor, query: torch.Tensor, key: torch.Tensor, slices: AttentionSlices
) -> torch.Tensor:
    """Other heads and queries may see every key: without any, kernels differ. Dimensions of one element serve all."""
    sizes = {HEADS: query.shape[HEADS], QUERIES: query.shape[QUERIES], KEYS: key.shape[QUERIES]}
    for (dim, size), parts in zip(sizes.items(), slices, strict=True):
        if own.ndim >= -dim and own.shape[dim] == size > 1:
            own = place(own, [(dim, each) for each in parts], fill=own.dtype == torch.bool)
    return own


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The default generators at `seed` inside; restored afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_generators(seed)
        yield


def _mix(first: int, second: int) -> int:
    """A 63-bit seed from two numbers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{first}:{second}".encode(), digest_size=8).digest(), "little") >> 1
