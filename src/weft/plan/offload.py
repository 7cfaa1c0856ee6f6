"""Offload of one plan: where its states are updated, and its record of host memory, files and copies.

The record is part of `weft plan --json`: bytes in host memory and in files, per rank and per node, term by term; bytes
that a step writes to the disks of a node, and that a day of training writes; copies by phase, hidden and exposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.core.open_choices import UpdatePlace
from weft.core.plan import Plan
from weft.plan.columns import Columns
from weft.plan.memory.offloaded import HostTerms, Offloaded
from weft.plan.plan_rows import columns_of
from weft.plan.request import Request
from weft.plan.time.compute import block_seconds
from weft.plan.time.state_stream import updates_on_host
from weft.plan.time.transfers import Transfer, transfers_of
from weft.plan.view import view_at

DAY_S = 86_400


def choose_update(request: Request, plan: Plan) -> UpdatePlace:
    """Where the offloaded states of `plan` are updated: as it says, or the faster place on the request's machine."""
    view = view_at(request, columns_of([plan]), np.arange(1), place=0)
    return "host" if bool(updates_on_host(view)[0]) else "device"


@dataclass(frozen=True, kw_only=True)
class OffloadRecord:
    """Bytes of one plan outside its devices, and copies of its first pipeline rank per step."""

    update: UpdatePlace | None  # None: the states are on the device
    host_terms: dict[str, int]  # per rank
    disk_terms: dict[str, int]
    ranks_per_node: int
    file_bytes: int  # per rank and step: read, and as many written
    step_s: float
    transfers: list[dict[str, Any]]

    @property
    def host_bytes_per_node(self) -> int:
        return sum(self.host_terms.values()) * self.ranks_per_node

    @property
    def written_bytes_per_day(self) -> float:
        """To the disks of a node."""
        return self.file_bytes * self.ranks_per_node * DAY_S / self.step_s

    def as_dict(self) -> dict[str, Any]:
        return {
            "host": _place(self.host_terms, self.ranks_per_node),
            "disk": {
                **_place(self.disk_terms, self.ranks_per_node),
                "read_bytes_per_step": self.file_bytes * self.ranks_per_node,
                "written_bytes_per_step": self.file_bytes * self.ranks_per_node,
                "written_bytes_per_day": round(self.written_bytes_per_day),
            },
            "transfers": self.transfers,
            **({"update": self.update} if self.update else {}),
        }


def offload_record(
    request: Request, columns: Columns, offloaded: Offloaded, row: int, *, step_s: float
) -> OffloadRecord:
    """The record of the one plan of `columns`, row `row` of `offloaded`."""
    is_off = bool(columns.offload_optimizer[0])
    moves = is_off or bool(columns.offload_parameters[0] or columns.offload_activations[0])
    view = view_at(request, columns, np.arange(1), place=0)
    copies = transfers_of(view, block_seconds(view)) if moves else None
    phases = {"forward": copies.forward, "backward": copies.backward, "update": copies.update} if copies else {}
    return OffloadRecord(
        update=("host" if bool(updates_on_host(view)[0]) else "device") if is_off else None,
        host_terms=_rounded(offloaded.host, row),
        disk_terms=_rounded(offloaded.disk, row),
        ranks_per_node=offloaded.ranks_per_node,
        file_bytes=round(float(copies.file_bytes[0])) if copies else 0,
        step_s=step_s,
        transfers=[_row(phase, copied) for phase, copied in phases.items() if float(copied.seconds[0]) > 0],
    )


def _row(phase: str, copied: Transfer) -> dict[str, Any]:
    return {
        "phase": phase,
        "in_bytes": round(float(copied.into_bytes[0])),
        "out_bytes": round(float(copied.out_bytes[0])),
        "seconds": float(copied.seconds[0]),
        "exposed_s": float(copied.exposed_s[0]),
    }


def _rounded(terms: HostTerms, row: int) -> dict[str, int]:
    return {name: round(float(values[row])) for name, values in terms.items() if np.round(values[row]) > 0}


def _place(terms: dict[str, int], ranks: int) -> dict[str, Any]:
    total = sum(terms.values())
    return {"bytes_per_rank": total, "bytes_per_node": total * ranks, "terms": terms}
