"""The ranks of one host of several: elastic's agent with a store, ranks and an end that the launcher decides.

The launcher (`weft.launch.hosts`) knows all hosts, so no agent decides about a restart: it reports the ends of its
ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from weft.launch.agent import STORE_TIMEOUT_S, Generations, RankAgent, RankSurroundings
from weft.launch.cause import RankEnd
from weft.launch.host_link import AgentLink, Message
from weft.launch.memory_files import MemoryFiles
from weft.launch.rank_processes import Streams, Variables, WarmRanks
from weft.train.ranks.store import serve_store

_READ_BYTES = 2**16
_STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, kw_only=True)
class HostOrder:
    """One generation on one host, as the launcher orders it. `port` None: this host serves the store."""

    generation: int
    command: tuple[str, ...]
    num_ranks: int
    host_rank: int
    num_hosts: int
    address: str
    port: int | None
    interface: str | None
    job: str

    @classmethod
    def from_message(cls, message: Message) -> HostOrder:
        fields = {name: message[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "command": tuple(message["command"])})


def run_generation(
    order: HostOrder, link: AgentLink, *, scratch: Path, memory: MemoryFiles | None, warm: WarmRanks | None
) -> None:
    """Start the ranks, report their output and ends, return when none runs. `memory`: this host's copies of states."""
    surroundings = HostSurroundings(order, scratch=scratch, memory=memory)
    spec = WorkerSpec(
        role="weft",
        local_world_size=order.num_ranks,
        rdzv_handler=OrderedRendezvous(order, link),
        entrypoint=order.command[0],
        args=order.command[1:],
        max_restarts=0,
    )
    agent = HostRanks(spec, order, link, surroundings, warm)
    link.abandon = agent.kill_all
    try:
        agent.run()
    finally:
        link.abandon = lambda: None
    agent.report()


class OrderedRendezvous(Generations):
    """The hosts, their order and the store's address come from the launcher."""

    def __init__(self, order: HostOrder, link: AgentLink) -> None:
        super().__init__()
        self._order, self._link = order, link

    def next_rendezvous(self) -> RendezvousInfo:
        order = self._order
        if order.port is None:
            store = serve_store(order.address, timeout_s=STORE_TIMEOUT_S)
            self._link.send("store", generation=order.generation, port=store.port)
        else:
            store = TCPStore(order.address, order.port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
        found = RendezvousStoreInfo(order.address, store.port)
        return RendezvousInfo(store, order.host_rank, order.num_hosts, found)

    def get_run_id(self) -> str:
        return self._order.job


class HostSurroundings(RankSurroundings):
    """Ranks write into files of the scratch folder: no reader blocks them, and a killed rank loses no line."""

    def __init__(self, order: HostOrder, *, scratch: Path, memory: MemoryFiles | None) -> None:
        super().__init__(scratch=scratch, num_ranks=order.num_ranks, interface=order.interface, memory=memory)
        self._order = order

    def begin(self, envs: dict[int, dict[str, str]]) -> None:
        for variables in envs.values():
            variables["TORCHELASTIC_RESTART_COUNT"] = str(self._order.generation)
            variables["PYTHONUNBUFFERED"] = os.environ.get("PYTHONUNBUFFERED", "1")
        super().begin(envs)

    def streams(self, variables: Variables) -> Streams | None:
        return self._stream("stdout", variables["RANK"]), self._stream("stderr", variables["RANK"])

    def _stream(self, name: str, rank: int | str) -> Path:
        return self.folder / f"{name}-{rank}"

    def new_output(self, ranks: list[int], offsets: dict[Path, int]) -> Iterator[tuple[int, str, str]]:
        """What the ranks have written since the last call: rank, stream, text."""
        for rank in ranks:
            for stream in _STREAMS:
                while text := _read_from(self._stream(stream, rank), offsets):
                    yield rank, stream, text


class HostRanks(RankAgent):
    """`RankAgent`, except that the launcher judges the ends, and that other hosts may end the generation."""

    def __init__(
        self,
        spec: WorkerSpec,
        order: HostOrder,
        link: AgentLink,
        surroundings: HostSurroundings,
        warm: WarmRanks | None,
    ) -> None:
        super().__init__(
            spec, generations=Generations(), surroundings=surroundings, stops=link, log=lambda line: None, warm=warm
        )
        self._order, self._link, self._outputs = order, link, surroundings
        self._offsets: dict[Path, int] = {}
        self._has_told = False

    def _await_imports(self, warm: WarmRanks) -> None:
        """A stop does not wait for them: ranks that start by their command end with it, and the launcher judges."""
        warm.wait_until_ready(lambda: self._link.count > 0 or self._link.ended_generation >= self._order.generation)

    def report(self) -> None:
        """The rest of the output, then the ends of all ranks."""
        self._forward_output()
        ends = [end.to_fields() for end in self._look()]
        self._link.send("ended", generation=self._order.generation, ends=ends)

    def kill_all(self) -> None:
        self._kill([end for end in self._look() if end.is_running])

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._forward_output()
        return super()._monitor_workers(worker_group)

    def _is_over(self, ends: list[RankEnd]) -> bool:
        has_failed = super()._is_over(ends)
        if has_failed and not self._has_told:  # other hosts need not wait for the last rank here
            self._has_told = True
            self._link.send("failing", generation=self._order.generation, grace_s=self._grace_s(ends))
        return has_failed or self._link.ended_generation >= self._order.generation

    def _grace_s(self, ends: list[RankEnd]) -> float:
        has_end = self._link.ended_generation >= self._order.generation
        return min(super()._grace_s(ends), self._link.grace_s) if has_end else super()._grace_s(ends)

    def _conclude(self, ends: list[RankEnd]) -> None:
        """Nothing: the launcher decides, by the ends of all hosts."""

    def _exit_barrier(self) -> None:
        """No barrier: the launcher waits for all hosts, and none of them can block another."""

    def _forward_output(self) -> None:
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        for rank, stream, text in self._outputs.new_output(ranks, self._offsets):
            self._link.send("output", generation=self._order.generation, rank=rank, stream=stream, text=text)


def _read_from(path: Path, offsets: dict[Path, int]) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offsets.get(path, 0))
            data = file.read(_READ_BYTES)
    except OSError:  # not created yet
        return ""
    if len(data) == _READ_BYTES and (end := data.rfind(b"\n")) >= 0:
        data = data[: end + 1]  # a line stays whole
    offsets[path] = offsets.get(path, 0) + len(data)
    return data.decode(errors="replace")
