"""The mask of a rank's queries over whole rows: the model's own mask functions, asked at positions of the whole row.

Hugging Face finds packed documents by jumps in `position_ids`; where the pieces of a rank meet there is one, and it is
no border. So documents are found in the positions of whole rows, and handed to its search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import active_fake_mode  # no public form

from weft.core.errors import ModelError
from weft.engine.cp.positions import Positions
from weft.engine.cp.row_masks import RowMask
from weft.engine.objective import IGNORED

Mask = Callable[..., Any]

MASKS, CAUSAL = "transformers.masking_utils", "causal_mask_function"


@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """The rows of a micro-batch whose forward runs. `length`: without padding. `documents`: of every position.

    `last_position`: the largest of all rows. `given_mask`: of the batch, over whole rows.
    """

    positions: Positions
    length: int
    documents: Tensor | None
    last_position: Tensor | int
    given_mask: Tensor | None

    @staticmethod
    def of(batch: Mapping[str, Tensor], positions: Positions, find_documents: Callable[[Tensor], Any]) -> WholeRows:
        """`find_documents`: transformers' search."""
        given, length = batch.get("position_ids"), batch["input_ids"].shape[1]
        documents = find_documents(given) if given is not None else None
        if documents is not None:  # padding is a document of its own
            documents = F.pad(documents, (0, positions.length - length), value=length)
        mask = batch.get("attention_mask")
        return WholeRows(
            positions=positions,
            length=length,
            documents=documents,
            last_position=length - 1 if given is None else given.amax(),
            given_mask=None if mask is None else F.pad(mask, (0, positions.length - length)),
        )

    @property
    def is_padded(self) -> bool:
        return self.positions.length > self.length

    def whole_mask(self, own: Tensor | None) -> Tensor | None:
        """The mask over whole rows that a model's mask of this rank's tokens stands for."""
        if own is None or own.shape[-1] != self.positions.own_length:
            return own
        if self.given_mask is None and active_fake_mode() is None and not own.all():
            raise ModelError(
                "context parallelism does not work here: the model hides positions by a mask of its own",
                hint="use mesh.cp = 1",
            )
        return self.given_mask


def own_rows(batch: Mapping[str, Tensor], positions: Positions) -> dict[str, Tensor]:
    """This rank's positions of every tensor of a batch. Padding has no label."""
    ids = batch["input_ids"]
    rows, length = ids.shape
    if "position_ids" not in batch:  # those of a slice would begin at 0
        counted = torch.arange(length, device=ids.device).expand(rows, -1)
        batch = {**batch, "position_ids": counted}
    taken = {}
    for name, value in batch.items():
        if value.shape[:2] != (rows, length):
            raise ModelError(
                f"context parallelism does not know the positions of {name!r}, of shape {tuple(value.shape)}",
                hint=f"use tensors of shape {(rows, length)}, or mesh.cp = 1",
            )
        fill = IGNORED if name == "labels" else 0
        ends = (0, 0) * (value.ndim - 2) + (0, positions.length - length)
        taken[name] = positions.take(F.pad(value, ends, value=fill), 1)
    return taken


def mask_of(inner: Mask, rows: WholeRows, *, queries: Positions, is_fused: bool, in_pieces: bool) -> Mask:
    """The mask function of the attention implementation `inner` for the queries that this rank attends with.

    None for plain causal attention if it is fused: its kernels need no mask. Nor has a window that no row fills a mask
    in one process, and the dropout of another kernel would draw other numbers. `in_pieces`: a model takes a `RowMask`.
    """
    positions, causal = rows.positions, getattr(sys.modules[MASKS], CAUSAL)

    def mask(batch_size: int, *, mask_function: Mask, device: torch.device | str = "cpu", **kwargs: Any) -> Any:
        padding, window = rows.whole_mask(kwargs.pop("attention_mask", None)), kwargs.get("local_size")
        may_skip = kwargs.get("allow_is_causal_skip", True) and padding is None
        if is_fused and may_skip and (mask_function is causal or (window is not None and rows.length < window)):
            return None

        def ask(own: Tensor, keys: range) -> Tensor:
            def at_positions(b: Any, h: Any, q: Any, k: Any) -> Any:
                allowed = mask_function(b, h, own[q], k)
                return allowed & ((k < rows.length) | (own[q] >= rows.length)) if rows.is_padded else allowed

            given = kwargs | {
                "q_length": len(own),
                "kv_length": len(keys),
                "q_offset": 0,
                "kv_offset": keys.start,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
                "use_vmap": False,
                "attention_mask": padding,
                "device": own.device,
            }
            made: Tensor = inner(batch_size=batch_size, mask_function=at_positions, **given)
            return made

        found = RowMask(
            ask,
            queries.spans,
            positions.length,
            rows=batch_size,
            device=torch.device(device),
            is_fixed=padding is None and rows.documents is None,
        )
        return found if in_pieces else found.whole()

    return mask
