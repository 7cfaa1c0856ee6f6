"""Attention of a rank's queries to whole rows, through the interfaces of transformers for attention and masks.

The model's own attention function is called, with keys and values of other ranks: soft caps, sinks, windows and grouped
heads are its own. Nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core.errors import ModelError, NotBuiltError
from weft.core.plan import ContextParallel
from weft.engine.activations.dropout import is_drawing, repeated_in_backward
from weft.engine.cp.causal import causal_attention
from weft.engine.cp.exchange import POSITIONS, gather, to_heads, to_rows
from weft.engine.cp.positions import Positions
from weft.engine.cp.regather import keeping_own, repeated
from weft.engine.cp.ring import Ring, ring_attention
from weft.engine.cp.row_masks import RowMask
from weft.engine.cp.slices import Attending
from weft.engine.mesh import ContextGroups
from weft.models.cp.softmax import Attention, is_by_head, scale_of, sinks_of

NAME = "weft_cp"  # of the implementation, in the registries of transformers
_KEY = "_weft_attention"  # of an attention module
_GROUPS = "num_key_value_groups"


class ContextAttention:
    """The attention of one module on one rank."""

    def __init__(
        self,
        policy: ContextParallel,
        groups: ContextGroups,
        own: Attention | None,
        *,
        name: str,
        is_fused: bool,
        keeps_gathered: bool,
        attending: Attending,
    ) -> None:
        """`own`: the model's attention function; `is_fused`: it takes no mask for causal attention.

        `keeps_gathered`: the block is recomputed, so nothing is kept in any case. `attending`: tells dropout.
        """
        self._policy, self._groups, self._own, self._name = policy, groups, own, name
        self._is_fused, self._keeps_gathered, self._attending = is_fused, keeps_gathered, attending

    def __deepcopy__(self, _memo: Any) -> ContextAttention:
        return self

    @cached_property
    def _place(self) -> tuple[int, int]:
        return dist.get_world_size(self._groups.whole), dist.get_rank(self._groups.whole)

    @cached_property
    def _head_ranks(self) -> int:
        return self._policy.head_ranks(self._place[0])

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        degree, rank = self._place
        positions = Positions(length=degree * key.shape[POSITIONS], degree=degree, rank=rank, split=self._policy.split)
        if self._own is None:
            raise self._refused("has no attention function that can be called with other keys")
        self._require_dropout(kwargs.get("dropout", 0.0))
        is_causal = kwargs.get("is_causal")
        if mask is not None:
            self._require_mask(mask, positions.of_groups(self._head_ranks).own_length, positions.length)
        elif not self._is_fused or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise self._refused("attends without a mask of transformers' mask functions")
        attend = self._over_positions if self._groups.heads is None else self._over_heads
        return attend(positions, module, query, key, value, mask, kwargs)

    def _over_positions(
        self, positions: Positions, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: Any
    ) -> Any:
        """Queries at `positions` to the keys of whole rows, of the heads that are here."""
        assert self._own is not None
        if self._groups.keys is None:
            with _with_groups(module, query.shape[1] // key.shape[1]), self._attending.by("ulysses"):
                return _in_pieces(self._own, module, query, (key, value), mask, kwargs)
        if self._policy.attention == "ring":
            ring = Ring(positions=positions, group=self._groups.keys, scale=scale_of(query, kwargs), mask=mask)
            return ring_attention(query, key, value, sinks_of(module, query.shape[1], kwargs), ring), None
        # fused attention beside dropout may save copies of gathered keys: it is repeated, and gathers again so
        is_repeated = kwargs.get("dropout", 0.0) > 0 and self._is_fused and not self._keeps_gathered
        keeps = self._keeps_gathered or is_repeated
        attend = partial(self._gathered, positions, module, mask=mask, kwargs=kwargs, keeps_gathered=keeps)
        return repeated_in_backward(attend, query, key, value) if is_repeated else attend(query, key, value)

    def _gathered(
        self,
        positions: Positions,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Any,
        kwargs: Any,
        keeps_gathered: bool,
    ) -> Any:
        assert self._own is not None
        group = self._groups.keys
        assert group is not None
        times = query.shape[1] // key.shape[1] if _GROUPS in vars(module) else 1
        wholes = [repeated(whole, times) for whole in gather(key, value, positions, group)]
        pairs = list(zip((key, value), wholes, strict=True))
        kept = nullcontext() if keeps_gathered else keeping_own(pairs, positions, group, repeats=times)
        with _with_groups(module, query.shape[1] // wholes[0].shape[1]), kept, self._attending.by("gather"):
            if mask is not None:
                return _in_pieces(self._own, module, query, wholes, mask, kwargs)
            scale, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
            return causal_attention(query, wholes[0], wholes[1], positions, scale=scale, dropout=dropout), None

    def _over_heads(
        self, positions: Positions, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: Any
    ) -> Any:
        """Neighbours exchange heads: each attends with the queries of all of them, and a share of the heads."""
        group, degree, heads = self._groups.heads, self._head_ranks, query.shape[1]
        assert group is not None
        if heads % degree:
            raise ModelError(
                f"{heads} heads do not divide over {degree} context-parallel ranks, which exchange them",
                hint="set context_parallel.attention = 'gather' and context_parallel.ulysses = 1",
            )
        near = positions.in_group(degree)
        times = _least_repeats(heads, key.shape[1], degree)
        key, value = repeated(key, times), repeated(value, times)
        query, key, value = (to_heads(x, near, group) for x in (query, key, value))
        share = slice(near.rank * (heads // degree), (near.rank + 1) * (heads // degree))
        kwargs = {name: given[share] if is_by_head(given, heads) else given for name, given in kwargs.items()}
        with _with_share(module, share, heads):
            out, weights = self._over_positions(positions.of_groups(degree), module, query, key, value, mask, kwargs)
        return to_rows(out.transpose(1, 2), near, group).transpose(1, 2).contiguous(), weights

    def _require_mask(self, mask: Any, queries: int, keys: int) -> None:
        """A mask that the interface did not make, or none, would be silently wrong."""
        if not isinstance(mask, Tensor | RowMask) or tuple(mask.shape[-2:]) != (queries, keys):
            raise self._refused(f"attends with a mask of its own, of shape {tuple(getattr(mask, 'shape', ()))}")

    def _require_dropout(self, rate: float) -> None:
        """Its masks are drawn for whole rows by `engine/activations/dropout.py` alone."""
        if rate > 0 and self._policy.attention == "ring":
            raise NotBuiltError(
                f"context_parallel.attention = 'ring' has no attention dropout, but {self._name} drops {rate:g}: its"
                " masks are of whole rows of scores, which a ring never has",
                hint="set context_parallel.attention = 'gather', or the model's attention dropout to 0",
            )
        if rate > 0 and None not in self._groups:
            raise NotBuiltError(
                f"context_parallel.ulysses has no attention dropout, but {self._name} drops {rate:g}",
                hint="set context_parallel.ulysses = 1, or the model's attention dropout to 0",
            )
        if rate > 0 and not is_drawing():
            raise RuntimeError(f"{self._name} drops attention weights outside of a seeded forward")

    def _refused(self, why: str) -> ModelError:
        return ModelError(f"context parallelism does not work here: {self._name} {why}", hint="use mesh.cp = 1")


def _in_pieces(
    own: Attention, module: nn.Module, query: Tensor, wholes: Sequence[Tensor], mask: Any, kwargs: Mapping[str, Any]
) -> Any:
    """The model's attention function, called for the queries and keys of each piece of a mask."""
    if not isinstance(mask, RowMask):
        return own(module, query, *wholes, mask, **kwargs)
    has_bias = any(isinstance(given, Tensor) and given.ndim > 2 for given in kwargs.values())
    if has_bias or kwargs.get("dropout", 0.0) > 0:  # a number per query and key, or drawn for whole rows
        return own(module, query, *wholes, mask.whole(), **kwargs)
    outs = []
    for queries, keys in mask.pieces:
        seen = (whole.narrow(POSITIONS, keys.start, len(keys)) for whole in wholes)
        piece = query.narrow(POSITIONS, queries.start, len(queries))
        outs.append(own(module, piece, *seen, mask.at(queries, keys), **kwargs)[0])
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 1)), None


@torch.compiler.disable(reason="exchanges between ranks stay outside of compiled graphs")  # type: ignore[no-untyped-call, untyped-decorator]
def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kwargs: Any) -> Any:
    """What transformers calls for the implementation `NAME`."""
    attention: ContextAttention = vars(module)[_KEY]
    return attention(module, query, key, value, mask, **kwargs)


def set_attention(module: nn.Module, attention: ContextAttention) -> None:
    vars(module)[_KEY] = attention


def _least_repeats(heads: int, kv_heads: int, degree: int) -> int:
    """Repeats of key-value heads so that they divide over the ranks, with their query heads."""
    groups = heads // kv_heads
    return next(times for times in range(1, groups + 1) if groups % times == 0 and kv_heads * times % degree == 0)


@contextmanager
def _with_groups(module: nn.Module, groups: int) -> Iterator[None]:
    """Inside, the module has `groups` query heads per key-value head."""
    if _GROUPS not in vars(module):  # its attention function has no groups, or finds them itself
        yield
        return
    before = getattr(module, _GROUPS)
    setattr(module, _GROUPS, groups)
    try:
        yield
    finally:
        setattr(module, _GROUPS, before)


@contextmanager
def _with_share(module: nn.Module, share: slice, heads: int) -> Iterator[None]:
    """Inside, the module's own parameters with a number per head (sinks) are those of a share of the heads."""
    before = {name: value for name, value in module._parameters.items() if is_by_head(value, heads)}
    for name, value in before.items():
        module._parameters[name] = value[share]  # type: ignore[index, assignment]
    try:
        yield
    finally:
        module._parameters.update(before)
