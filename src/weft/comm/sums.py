"""`GroupSum`: the sum of tensors over a group, by the backend or by an algorithm of ours.

Observers see one all-reduce either way: before messages of ours are sent, the operator `weft::all_reduce_by` is called,
which does nothing. On a CPU messages wait in a thread, in the order of the calls, while a backward goes on; NCCL's are
queued on the current stream.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.algorithms.registry import ALGORITHMS
from weft.comm.wire import Wire
from weft.core.errors import MeshError

BACKEND = "auto"
OPERATOR = "all_reduce_by"

_library: Any = torch.library.Library("weft", "DEF")  # type: ignore[no-untyped-call]
_library.define(f"{OPERATOR}(Tensor values, str group, str algorithm) -> ()")
_library.impl(OPERATOR, lambda values, group, algorithm: None, "CompositeExplicitAutograd")


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Groups for messages to higher and to lower ranks."""

    up: dist.ProcessGroup
    down: dist.ProcessGroup


class GroupSum:
    """Sums over `group`; `ways` are needed by every algorithm but the backend's. Collective."""

    def __init__(self, group: dist.ProcessGroup, *, algorithm: str = BACKEND, ways: Ways | None = None) -> None:
        self.group, self.algorithm = group, algorithm
        self._ways = ways
        self._wire: Wire | None = None
        uses_nodes = algorithm != BACKEND and ALGORITHMS["all_reduce"][algorithm].uses_nodes
        self._per_node = ranks_per_node(group) if uses_nodes else 1  # here: a step has no collectives but those planned
        self._thread: ThreadPoolExecutor | None = None

    def sum(self, values: Tensor, *, place: int = 0, sizes: tuple[int, ...] = ()) -> None:
        """Sum a contiguous tensor in place. `place`: which sum of a step it is, for those that keep errors; `sizes`: of
        the parameters in it, for those that encode it."""
        if self.algorithm == BACKEND:
            dist.all_reduce(values, group=self.group)
        elif self.group.size() > 1:
            self._announce(values)
            self._exchange(values)

    def begin(self, values: Tensor, *, place: int = 0, sizes: tuple[int, ...] = ()) -> torch.futures.Future[Tensor]:
        """Begin to sum; the future's value is `values`."""
        if self.algorithm == BACKEND:
            work = dist.all_reduce(values, group=self.group, async_op=True)
            if work is None:
                raise RuntimeError("an asynchronous all-reduce returned no handle")

            def result(future: torch.futures.Future[object]) -> Tensor:
                future.value()  # raises the all-reduce's error; its value is unused: a fake group returns no tensors
                return values

            summed: torch.futures.Future[Tensor] = work.get_future().then(result)
            return summed
        self._announce(values)
        if values.device.type != "cpu":
            self._exchange(values)
            done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[values.device])
            done.set_result(values)
            return done
        return self._in_thread(values)

    def finish(self) -> None:
        """After the last sum of a backward; a no-op unless one waits for its next."""

    def _in_thread(self, values: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradient sums")

        def run() -> None:
            try:
                self._exchange(values)
            except Exception as error:  # the backward that waits raises it
                future.set_exception(error)  # type: ignore[arg-type]  # torch's stub is of another signature
            else:
                future.set_result(values)

        self._thread.submit(run)
        return future

    def _announce(self, values: Tensor) -> None:
        getattr(torch.ops.weft, OPERATOR)(values, self.group.group_name, self.algorithm)

    @torch.no_grad()
    def _exchange(self, values: Tensor) -> None:
        """The messages; a dry run has none."""
        wire = self._wire or self._first(values)
        wire.all_reduce(values, ALGORITHMS["all_reduce"][self.algorithm], per_node=self._per_node)

    def _first(self, values: Tensor) -> Wire:
        if self._ways is None:
            raise RuntimeError(f"{self.algorithm} needs groups for its messages")
        self._wire = Wire(self._ways.up, self._ways.down, device_type=values.device.type)
        return self._wire


def ranks_per_node(group: dist.ProcessGroup) -> int:
    """Ranks of the group on each of its hosts, which must be as many on all, and neighbours. Collective."""
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, f"{socket.gethostname()} {_boot()}", group=group)
    counts = list(Counter(hosts).values())
    in_order = sorted(hosts, key=hosts.index) == hosts
    if len(set(counts)) > 1 or not in_order:
        raise MeshError(
            f"data_parallel.all_reduce = 'hierarchical' needs equally many neighbours on every host, not {counts}",
            hint="use data_parallel.all_reduce = 'ring', or a mesh whose replicas divide over the hosts",
        )
    return counts[0]


def _boot() -> str:
    """Tells hosts of one name apart."""
    path = "/proc/sys/kernel/random/boot_id"
    if not os.path.exists(path):
        return ""
    with open(path, encoding="ascii") as file:
        return file.read().strip()
