"""Copies of the state in host memory (`checkpoint.memory_every`) for a run: whether they are possible, with what room.

The launcher's memory files hold them (`launch/memory_files.py`); `checkpoint/memory_copies.py` writes and reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.checkpoint.exchange import Exchange
from weft.checkpoint.memory_copies import MemoryCopies, Neighbours
from weft.checkpoint.memory_file import MemoryFile, StateTable
from weft.checkpoint.staging import local_shards
from weft.core.plan import Plan
from weft.core.processes import machine_id
from weft.core.run_spec import RunSpec
from weft.engine.engine import Engine
from weft.engine.offload.host_room import require_room
from weft.train.ranks.environment import MEMORY_FILES_VARIABLE

_OWN = 2  # files of a rank's own copies


def open_copies(run: RunSpec, plan: Plan, engine: Engine) -> tuple[MemoryCopies | None, str]:
    """The copies, if the run asks for them and a launcher owns memory for them; a note. Collective."""
    if not run.checkpoint.memory_every:
        return None, ""
    timeout = timedelta(seconds=run.train.collective_timeout_s)
    is_alone = dist.get_world_size() == 1
    group = None if is_alone else engine.topology.groups.new(title="copies", backend="gloo", timeout=timeout)
    exchange = Exchange(group)
    files, problem = _open_files(os.environ)
    places = exchange.all_gather({"host": _host(os.environ), "problem": problem})
    problems = [place["problem"] for place in places if place["problem"]]
    if problems:
        return None, f"checkpoint.memory_every has no effect: {problems[0]}"
    neighbours, note = neighbours_of(exchange.rank, [place["host"] for place in places])
    used = files[: None if neighbours is not None else _OWN]
    _require_room(engine, used)
    return MemoryCopies(used, exchange, layout=_layout(plan), neighbours=neighbours), note


def neighbours_of(rank: int, hosts: list[str]) -> tuple[Neighbours | None, str]:
    """The ranks that exchange copies with `rank`: its counterparts on the next and the previous host; a note."""
    by_host: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    if len(by_host) == 1:
        return None, ""
    if len({len(ranks) for ranks in by_host.values()}) > 1:
        return None, "copies in memory stay on their own host: the hosts have different numbers of ranks"
    names = list(by_host)
    place, number = names.index(hosts[rank]), by_host[hosts[rank]].index(rank)
    keeper, guest = (by_host[names[(place + step) % len(names)]][number] for step in (1, -1))
    return Neighbours(keeper=keeper, guest=guest), ""


def _open_files(environment: Mapping[str, str]) -> tuple[list[MemoryFile], str]:
    paths = environment.get(MEMORY_FILES_VARIABLE, "")
    if not paths:
        return (
            [],
            "copies in memory are for ranks of `weft train --max-restarts N` or `weft launch --on hosts`, on Linux",
        )
    try:
        return [MemoryFile(Path(path)) for path in paths.split(os.pathsep)], ""
    except OSError as error:
        return [], f"the launcher's memory cannot be opened ({error.strerror})"


def _host(environment: Mapping[str, str]) -> str:
    """Of the process that owns the memory: when it dies, its copies are gone."""
    owner = environment.get(MEMORY_FILES_VARIABLE, "").split("/fd/")[0]
    return f"{machine_id()} {owner}"


def _require_room(engine: Engine, files: list[MemoryFile]) -> None:
    one = StateTable.of(local_shards(engine.state())).size_bytes
    taken = sum(file.allocated_bytes for file in files)
    require_room(
        max(0, len(files) * one - taken),
        device=engine.device,
        what="copies of the state in memory (checkpoint.memory_every)",
        hint="set checkpoint.memory_every = 0, or raise the memory limit of the container",
    )


def _layout(plan: Plan) -> str:
    tables: Any = plan.model_dump(mode="json")
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()
