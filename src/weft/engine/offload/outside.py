"""Bytes of a rank's offloaded states outside the device, by name: in host memory and in files. As the planner has them.

masters, moments   where they are kept; with offload.durable = "step" twice in files
staging            chunks on their way: of states that are in files, of gradients and weights for the host's update
weights            at rest, with offload.parameters
gradients          of the step before, which a thread of the host still updates by
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from weft.engine.offload.chunks import MASTER, WEIGHT, StateBank
from weft.engine.offload.slab import slab_bytes


@dataclass(frozen=True, kw_only=True)
class OutsideBytes:
    """Terms without bytes are absent."""

    host: Mapping[str, int]
    files: Mapping[str, int]

    @classmethod
    def of(
        cls,
        kept: Mapping[StateBank, Mapping[str, torch.dtype]],
        *,
        num_files: int,
        staging_bytes: int,
        pending_bytes: int,
        frozen_bytes: int,
    ) -> Self:
        """`kept`: the tensors of each bank, by key, in `num_files` files each, or in host memory if there are none.
        `frozen_bytes`: of frozen weights that rest in host memory."""
        states = {"masters": 0, "moments": 0, "weights": frozen_bytes}
        for bank, dtypes in kept.items():
            for key, dtype in dtypes.items():
                count = bank.num_entries(key, bank.num_elements)
                is_master = key in (MASTER, WEIGHT)
                is_weight = bank.has_weights and key == (WEIGHT if WEIGHT in dtypes else MASTER)
                term = "weights" if is_weight else "masters" if is_master else "moments"
                states[term] += slab_bytes(count, dtype)
        in_files = {name: num_files * nbytes for name, nbytes in states.items()}
        on_host = {} if num_files else states
        return cls(
            host=_existing({**on_host, "staging": staging_bytes, "gradients": pending_bytes}),
            files=_existing(in_files),
        )


def _existing(terms: Mapping[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in terms.items() if nbytes}
