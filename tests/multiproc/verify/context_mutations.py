"""Realistic bugs of context parallelism: each trains, and wrongly."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from mutations import replaced
from torch import Tensor

import weft.engine.cp.attention as attention
import weft.engine.cp.causal as causal
import weft.engine.cp.context as context
import weft.engine.cp.exchange as exchange
import weft.engine.cp.masks as masks
import weft.engine.cp.ring as ring
import weft.engine.mesh as mesh
from weft.engine.cp.context import CPContext
from weft.engine.cp.positions import Positions
from weft.engine.cp.slices import ContextSlices, OwnPositions


def positions_from_zero_in_the_second_piece() -> AbstractContextManager[None]:
    """A slice's own positions in place of those of the whole row."""

    def make(original: Any) -> Any:
        def rows(batch: Any, positions: Positions) -> dict[str, Tensor]:
            taken: dict[str, Tensor] = original(batch, positions)
            given = taken["position_ids"]
            half = given.shape[1] // 2
            taken["position_ids"] = torch.cat([given[:, :half], given[:, half:] - given[:, half : half + 1]], 1)
            return taken

        return rows

    return replaced(context, "own_rows", make)


def label_lost_at_a_border() -> AbstractContextManager[None]:
    """The last label of a piece, as if labels were shifted inside of it."""

    def make(original: Any) -> Any:
        def rows(batch: Any, positions: Positions) -> dict[str, Tensor]:
            taken: dict[str, Tensor] = original(batch, positions)
            taken["labels"] = taken["labels"].clone()
            taken["labels"][:, taken["labels"].shape[1] // 2 - 1] = masks.IGNORED
            return taken

        return rows

    return replaced(context, "own_rows", make)


def mask_off_by_one_at_an_edge() -> AbstractContextManager[None]:
    """The first query of each piece but the row's first sees one key more."""

    def make(original: Any) -> Any:
        def piece(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
            queries, keys = query.shape[2], key.shape[2]
            if queries == keys:
                return original(query, key, value, scale=scale)  # type: ignore[no-any-return]
            allowed = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            allowed[0, keys - queries + 1] = True
            grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, allowed, scale=scale, enable_gqa=grouped)

        return piece

    return replaced(causal, "_piece", make)


def gradients_of_keys_not_summed() -> AbstractContextManager[None]:
    """Each rank keeps the gradient of its own queries alone."""

    def make(original: Any) -> Any:
        def gather(key: Tensor, value: Tensor, positions: Positions, group: Any) -> Any:
            wholes = original(key.detach(), value.detach(), positions, group)
            index = positions.index(key.device)
            return tuple(whole.index_copy(2, index, own) for whole, own in zip(wholes, (key, value), strict=True))

        return gather

    return replaced(attention, "gather", make)


def keys_in_rank_order() -> AbstractContextManager[None]:
    def make(_original: Any) -> Any:
        return lambda _self, by_rank, dim: torch.cat(list(by_rank), dim)

    return replaced(exchange.Positions, "in_order", make)


def weight_counted_by_every_rank() -> AbstractContextManager[None]:
    return replaced(CPContext, "owns_weight", lambda _original: property(lambda _self: True))


def documents_lost() -> AbstractContextManager[None]:
    return replaced(CPContext, "_documents", lambda _original: lambda _self, _positions: None)


def seam_taken_for_a_border() -> AbstractContextManager[None]:
    """Documents found in the jumps of a rank's own positions, where its two pieces meet."""

    def make(original: Any) -> Any:
        def documents(self: CPContext, positions: Any) -> Any:
            found = original(self, positions)
            if found is None:
                return None
            half = torch.arange(found.shape[1]) >= found.shape[1] // 2
            return found * 2 + half.long()

        return documents

    return replaced(CPContext, "_documents", make)


def window_one_key_short() -> AbstractContextManager[None]:
    """Keys of a rank's window counted from the query before."""

    def make(original: Any) -> Any:
        def mask_of(inner: Any, rows: Any, **kwargs: Any) -> Any:
            made = original(inner, rows, **kwargs)

            def mask(*, mask_function: Any, **others: Any) -> Any:
                def shifted(b: Any, h: Any, q: Any, k: Any) -> Any:
                    return mask_function(b, h, q, k) & mask_function(b, h, q + 1, k)

                is_plain = mask_function is masks.sys.modules[masks.MASKS].causal_mask_function
                return made(mask_function=mask_function if is_plain else shifted, **others)

            return mask

        return mask_of

    return replaced(context, "mask_of", make)


def gradients_of_passed_keys_dropped() -> AbstractContextManager[None]:
    """A ring in which each rank keeps the gradients of its own queries alone."""
    return replaced(ring, "_add_arrived", lambda _original: lambda leaving, *_args: leaving.wait())


def ring_mask_off_by_one_at_an_edge() -> AbstractContextManager[None]:
    """The first query of each piece sees one key more of its own triangle."""

    def make(original: Any) -> Any:
        def seen(self: Any, queries: range, own: range, keys: range) -> Any:
            found = original(self, queries, own, keys)
            if found is None or not found.is_triangle:
                return found
            allowed = torch.ones(len(own), len(keys), dtype=torch.bool).tril()
            allowed[0, 1] = True
            return ring.Seen(mask=allowed[None, None])

        return seen

    return replaced(ring.Ring, "_seen", make)


def parts_averaged() -> AbstractContextManager[None]:
    """Parts of a softmax with equal shares in place of those of their sums."""

    def make(original: Any) -> Any:
        def merged(one: Any, other: Any) -> Any:
            right = original(one, other)
            return right._replace(out=(one.out + other.out) / 2)

        return merged

    return replaced(ring, "_merged", make)


def masks_by_local_position() -> AbstractContextManager[None]:
    """Hidden states drop as if a rank's positions were a row: every rank draws the same mask."""

    def make(original: Any) -> Any:
        return lambda self, shape: original(self, shape) if self.is_attending else []

    return replaced(ContextSlices, "of", make)


def masks_in_rank_order() -> AbstractContextManager[None]:
    """Slices of whole masks, as if every split were contiguous."""

    def make(_original: Any) -> Any:
        def take(self: OwnPositions, full: Tensor, dim: int) -> Tensor:
            positions = self.whole.positions
            own = positions.own_length
            return self.whole.take(full, dim).narrow(dim, positions.rank * own, own)

        return take

    return replaced(OwnPositions, "take", make)


def masks_of_padded_rows() -> AbstractContextManager[None]:
    """Masks are drawn for padding too, which shifts those of the positions behind it."""

    def make(_original: Any) -> Any:
        def slices_of(self: CPContext, batch: Any) -> ContextSlices:
            positions = self._positions(batch)
            return ContextSlices(positions, positions.length, self.attending)

        return slices_of

    return replaced(CPContext, "slices_of", make)


def masks_of_the_first_heads() -> AbstractContextManager[None]:
    """Ulysses: a rank's share of the heads drops as the first ones."""
    return replaced(
        ContextSlices, "in_attention", lambda original: lambda self, shape: original(self, shape)._replace(heads=())
    )


def heads_exchanged_between_nodes() -> AbstractContextManager[None]:
    """Ranks far apart exchange heads, and neighbours pass keys and values on."""

    def make(original: Any) -> Any:
        def groups(*args: Any) -> Any:
            made = original(*args)
            return made._replace(heads=made.keys, keys=made.heads)

        return groups

    return replaced(mesh, "_context_groups", make)


def every_rank_has_the_sinks_of_the_first_share() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        return lambda self, size: replace(original(self, size), rank=0)

    return replaced(Positions, "in_group", make)


def neighbours_in_reverse() -> AbstractContextManager[None]:
    """Outputs come back from each neighbour as if it were another."""

    def make(original: Any) -> Any:
        def rows(x: Tensor, positions: Positions, group: Any) -> Tensor:
            found: Tensor = original(x, positions, group)
            return torch.cat(found.chunk(positions.degree, 1)[::-1], 1)

        return rows

    return replaced(attention, "to_rows", make)


def rotary_of_the_rank_s_own_positions() -> AbstractContextManager[None]:
    """A table that follows the longest position sees only those that the rank has."""

    def make(_original: Any) -> Any:
        def rotary(_self: CPContext, forward: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        return rotary

    return replaced(CPContext, "rotary", make)
