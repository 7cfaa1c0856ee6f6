"""The agent of one host: `python -m weft.launch.host_agent`, started by the launcher through ssh. It decides nothing.

    first line (folder, environment, files) -> hello with the host's facts -> orders: listen, reach, start, leave

It imports torch when the first generation starts, and keeps it. The libraries of the ranks are imported from the
beginning, by the process from which the ranks of all generations are forked (`weft.launch.warm_server`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from weft.core.network import own_addresses
from weft.launch.host_facts import own_facts
from weft.launch.host_link import AgentLink, Message
from weft.launch.meeting import MeetingPoint, addresses_to_offer, reach
from weft.launch.memory_files import MemoryFiles
from weft.launch.rank_processes import WarmRanks, warm_ranks


def main() -> None:
    # Prints of libraries must not mix with events: stdout becomes stderr.
    events = os.dup(1)
    os.dup2(2, 1)
    link = AgentLink(0, events)
    first = link.read_first()
    os.environ.update(first["environment"])
    scratch = Path(tempfile.mkdtemp(prefix="weft-host-"))
    try:
        HostAgent(link, scratch).serve(first)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class HostAgent:
    def __init__(self, link: AgentLink, scratch: Path) -> None:
        self._link, self._scratch = link, scratch
        self._listener: MeetingPoint | None = None
        self._warm: WarmRanks | None = None
        self._memory: MemoryFiles | None = None  # outlives generations: ranks that are lost leave their copies in it

    def serve(self, first: Message) -> None:
        if first["logs"] is not None:
            logs = Path(first["logs"])
            self._link.write_log = lambda name, text: _append(logs / name, text)
        self._link.start(lease_s=first["lease_s"])
        self._link.send("hello", facts=own_facts(first["files"]), addresses=addresses_to_offer(), pid=os.getpid())
        self._warm = warm_ranks(first["imports"], scratch=self._scratch, num_ranks=first["num_ranks"], interface=None)
        while self._obey(self._link.next_order()):
            pass
        self._link.finish()

    def _obey(self, order: Message) -> bool:
        if order["order"] == "listen":
            self._listen()
        elif order["order"] == "reach":
            self._reach(order)
        elif order["order"] == "start":
            self._start(order)
        return bool(order["order"] != "leave")

    def _listen(self) -> None:
        self._stop_listening()
        self._listener = MeetingPoint()
        self._link.send("listening", port=self._listener.port, token=self._listener.token)

    def _reach(self, order: Message) -> None:
        found = reach(order["addresses"], port=order["port"], token=order["token"])
        interfaces = own_addresses()
        self._link.send("reached", addresses={address: interfaces.get(local) for address, local in found.items()})

    def _start(self, order: Message) -> None:
        self._stop_listening()
        from weft.launch.host_ranks import HostOrder, run_generation  # torch
        from weft.launch.local import quiet_elastic

        generation = HostOrder.from_message(order)
        self._make_memory(generation.num_ranks)
        with quiet_elastic():
            run_generation(generation, self._link, scratch=self._scratch, memory=self._memory, warm=self._warm)

    def _make_memory(self, num_ranks: int) -> None:
        if sys.platform != "linux" or (self._memory is not None and self._memory.num_ranks >= num_ranks):
            return
        if self._memory is not None:
            self._memory.close()
        self._memory = MemoryFiles(num_ranks=num_ranks)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _append(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # a log must not end a training
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
