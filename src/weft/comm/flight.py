"""The collectives that this rank has issued, by group, read from torch's flight recorder.

The recorder is always on, counts the collectives of every caller and writes in C++ (2000 entries,
`TORCH_FR_BUFFER_SIZE`); nothing here runs in a step. Gloo's sends and receives are not recorded. A number is a
collective's sequence number in its group: equal on all ranks, as long as they issue the same collectives.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d

_DEFAULT_GROUP = "default_pg"
_KEPT = 16  # per group: enough to compare two ranks that differ by a few collectives
_ended: set[tuple[int, str]] = set()  # groups of process groups before; the recorder numbers all of a process
_CONTEXT = 3  # collectives before one, which say what usually follows


@dataclass(frozen=True, kw_only=True)
class Issued:
    """One collective: `number` counts from 1 in its group."""

    number: int
    name: str
    shapes: str
    is_usual: bool | None = None  # whether it followed the same collectives before too; None: they never came before


@dataclass(frozen=True, kw_only=True)
class GroupTrace:
    """The last collectives that a rank has issued in one group, and the group's ranks."""

    title: str  # for people: "data parallel"
    ranks: tuple[int, ...]
    last: tuple[Issued, ...]  # oldest first; empty before the first

    @property
    def number(self) -> int:
        """The last collective's number; 0 before the first."""
        return self.last[-1].number if self.last else 0

    def at(self, number: int) -> Issued | None:
        return next((issued for issued in self.last if issued.number == number), None)


def progress_mark() -> bytes:
    """A value that differs after every collective; cheap enough to be read every second."""
    return b"".join(dump(False, False) for dump in _recorders())


def is_pending() -> bool:
    """Whether this rank has issued a collective that is not complete. Cheap."""
    return any(
        int(state["last_completed_collective"]) < int(state["last_enqueued_collective"])
        for key, state in _states()
        if key not in _ended
    )


def begin_world() -> None:
    """Call before the default group is created: a collective of an earlier one that never ended is not pending."""
    _ended.update(key for key, _ in _states())


def _states() -> Iterator[tuple[tuple[int, str], dict[str, str]]]:
    for index, dump in enumerate(_recorders()):
        for group, state in json.loads(dump(False, False)).get("pg_status", {}).items():
            yield (index, group), state


def group_traces() -> dict[str, GroupTrace]:
    """Traces by backend and group, the most recently used last. Takes up to 0.1 s."""
    entries = sorted(_entries(), key=lambda entry: entry.get("time_created_ns", 0))
    entries = [entry for entry in entries if not entry.get("is_p2p")]
    found: dict[str, list[tuple[dict[str, Any], bool | None]]] = {}
    for entry, is_usual in zip(entries, usual([_kind(entry) for entry in entries]), strict=True):
        key = f"{entry['profiling_name'].partition(':')[0]} {entry['process_group'][0]}"
        found[key] = [*found.pop(key, [])[-_KEPT + 1 :], (entry, is_usual)]
    ranks = _ranks_by_name()
    return {key: _trace(entries, ranks) for key, entries in found.items()}


def usual(kinds: Sequence[Hashable]) -> list[bool | None]:
    """For each of a rank's collectives in order: whether it followed the same ones before too; None for a first time.

    Every step issues the same: the rank that skipped a collective is the one for which this is False."""
    followers: dict[tuple[Hashable, ...], set[Hashable]] = {}
    found: list[bool | None] = []
    for at, kind in enumerate(kinds):
        known = followers.setdefault(tuple(kinds[max(0, at - _CONTEXT) : at]), set())
        found.append(kind in known if known and at >= _CONTEXT else None)
        known.add(kind)
    return found


def _kind(entry: Mapping[str, Any]) -> Hashable:
    return (*entry["process_group"], entry["profiling_name"], str(entry.get("input_sizes", "")))


def _trace(entries: list[tuple[dict[str, Any], bool | None]], ranks: dict[str, tuple[int, ...]]) -> GroupTrace:
    name, description = entries[0][0]["process_group"]
    issued = (
        Issued(
            number=entry["collective_seq_id"],
            name=entry["profiling_name"].partition(":")[2].strip("_"),
            shapes=str(entry.get("input_sizes", "")),
            is_usual=is_usual,
        )
        for entry, is_usual in entries
    )
    return GroupTrace(title=_title(description), ranks=ranks.get(name, ()), last=tuple(issued))


def _title(description: str) -> str:
    if description == _DEFAULT_GROUP:
        return "all ranks"
    return "" if description == "undefined" else description.removeprefix("mesh_")


def _entries() -> Iterator[dict[str, Any]]:
    for dump in _recorders():
        yield from json.loads(dump(True, False)).get("entries", ())


def _recorders() -> Iterator[Any]:
    # Private, without a public form. tests/unit/comm/test_groups.py fails when they move.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            yield dump


def _ranks_by_name() -> dict[str, tuple[int, ...]]:
    if not dist.is_initialized():
        return {}
    known = getattr(distributed_c10d, "_world").pg_group_ranks  # noqa: B009  # no public list of groups
    # an integer stands for a group that this rank is not in
    groups = [group for group in known if isinstance(group, dist.ProcessGroup)]
    return {str(group.group_name): tuple(sorted(known[group])) for group in groups}
