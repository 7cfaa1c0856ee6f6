"""Bytes of a rank's offloaded states outside the device, by name: in host memory and in files. As the planner has them.

masters, moments   where they are kept; with offload.durable = "step" twice in files
staging            chunks on their way: of states that are in files, of gradients and weights for the host's update
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.engine.offload.chunks import MASTER, StateBank
from weft.engine.offload.file_layout import FileLayout
from weft.engine.offload.file_store import WEIGHT
from weft.engine.offload.slab import slab_bytes

Outside = dict[str, dict[str, int]]


def outside_bytes(
    banks: Sequence[StateBank],
    dtypes: Sequence[Mapping[str, torch.dtype]],
    *,
    layout: FileLayout | None,
    num_files: int,
    num_slots: int,
    staged_bytes: int,
) -> Outside:
    """`dtypes`: of each bank's kept tensors, by key. `staged_bytes`: of a slot, for the host's update."""
    kept = {"masters": 0, "moments": 0}
    for bank, of_bank in zip(banks, dtypes, strict=True):
        for key, dtype in of_bank.items():
            kept["masters" if key in (MASTER, WEIGHT) else "moments"] += slab_bytes(bank.num_elements, dtype)
    if layout is None:
        return {"host": {**kept, "staging": num_slots * staged_bytes}, "files": {}}
    staging = num_slots * (layout.slot_bytes + staged_bytes)
    return {"host": {"staging": staging}, "files": {name: num_files * size for name, size in kept.items()}}
