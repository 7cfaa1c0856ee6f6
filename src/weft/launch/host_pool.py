"""The hosts of a launch: their links, the checks before anything starts, lost hosts and their return.

One queue has the events of all links. `pump` handles output and closed links, and returns what concerns a generation.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from weft.core.errors import HostsError, RankError
from weft.launch.host_facts import Facts, describe_differences, own_facts
from weft.launch.host_link import Message
from weft.launch.host_list import Host
from weft.launch.hosts_request import HostsRequest
from weft.launch.ssh import Event, SshLink, ssh_command
from weft.launch.stop_signals import StopCount
from weft.train.folder.run_folder import LOGS_NAME

_LAUNCHER = "this machine"
_LIBRARIES = ("OMP_", "MKL_", "GLOO_", "NCCL_", "UCX_", "TORCH", "PYTORCH", "CUDA_", "HIP_", "ROCR_", "PYTHON")
_SERVICES = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "WEFT_", "XDG_CACHE_HOME")
_NEVER_KEPT = ("WEFT_SCRATCH", "WEFT_LAUNCHER_PID", "TORCHELASTIC_")
_SHOWN_DIFFERENCES = 4
_POLL_S = 0.1
_RETRY_S = 5.0
_CLOSE_S = 5.0


@dataclass(kw_only=True, eq=False)
class Peer:
    """A host and its current link; `facts` and `addresses` are known once its agent has answered."""

    host: Host
    link: SshLink
    facts: Facts = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    is_open: bool = True
    why_lost: str = ""
    tried_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def is_ready(self) -> bool:
        return self.is_open and bool(self.facts)


def connection_command(request: HostsRequest, host: str) -> list[str]:
    """The words that start the agent on a host."""
    return ssh_command(
        host,
        ssh=request.ssh,
        options=request.ssh_options,
        python=request.python,
        directory=request.directory,
        connect_timeout_s=request.connect_timeout_s,
    )


class HostPool:
    def __init__(self, request: HostsRequest, *, log: Callable[[str], None]) -> None:
        self._request, self._log = request, log
        self._files = [word for word in request.command if os.path.isfile(word)]
        self._own_facts = own_facts(self._files)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._output = RankOutput(datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))
        self.peers: list[Peer] = []
        self.log_host: Peer | None = None  # the first host of the current generation

    def connect(self, stops: StopCount) -> None:
        """Links to all hosts, checked: raises one error that names every host with a problem."""
        self.peers = [Peer(host=host, link=self._link(host)) for host in self._request.hosts]
        deadline = time.monotonic() + self._request.connect_timeout_s
        while any(peer.is_open and not peer.facts for peer in self.peers) and time.monotonic() < deadline:
            self.pump(_POLL_S)
            if stops.count:
                raise RankError("stopped before the ranks were ready; nothing was saved")
        silent = [peer for peer in self.peers if not peer.is_ready]
        if silent:
            errors = [peer.link.error() for peer in silent]
            raise HostsError(_joined([error.message for error in errors]), hint=errors[0].hint)
        if differences := self._differences(self.peers):
            hint = "install the same versions and copy the same files on every host, or use a shared folder"
            raise HostsError(_joined(differences), hint=hint)

    def pump(self, timeout_s: float) -> tuple[Peer, Message] | None:
        """The next event of a generation, if one comes in time."""
        self._find_silent()
        try:
            link, message = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        peer = next((peer for peer in self.peers if peer.link is link), None)
        if peer is None:  # of a link that was given up
            return None
        if message["event"] == "hello":
            self._welcome(peer, message)
        elif message["event"] == "closed":
            self._lose(peer, "its connection ended")
        elif message["event"] == "output":
            self._show(peer, message)
        else:
            return peer, message
        return None

    def retry_lost(self) -> None:
        """Try lost hosts again, each every few seconds; one that answers as before is ready."""
        for peer in self.peers:
            if not peer.is_open and time.monotonic() - peer.tried_at > _RETRY_S:
                peer.link = self._link(peer.host)
                peer.is_open, peer.facts, peer.tried_at = True, {}, time.monotonic()

    def give_up(self, peer: Peer, why: str) -> None:
        self._lose(peer, why)

    def close(self) -> None:
        for peer in self.peers:
            if peer.is_open:
                peer.link.send("leave")
        for peer in self.peers:
            peer.link.close(patience_s=_CLOSE_S)
        while not self._events.empty():
            self.pump(0.0)
        self._output.end()

    def _link(self, host: Host) -> SshLink:
        request = self._request
        command = connection_command(request, host.name)
        first = {
            "environment": {**kept_environment(), **request.environment},
            "lease_s": request.lease_s,
            "imports": request.imports,
            "num_ranks": host.num_ranks,
            "files": self._files,
            "logs": str(request.folder / LOGS_NAME) if request.folder is not None else None,
        }
        return SshLink(host.name, command, first=first, events=self._events)

    def _welcome(self, peer: Peer, message: Message) -> None:
        peer.facts, peer.addresses = message["facts"], message["addresses"]
        others = [other for other in self.peers if other.is_ready and other is not peer]
        is_return = bool(peer.why_lost)
        if is_return and (differences := self._differences([*others[:1], peer])):
            self._lose(peer, _joined(differences))
        elif is_return:
            self._log(f"{peer.name} answers again")
            peer.why_lost = ""

    def _differences(self, peers: Sequence[Peer]) -> list[str]:
        """Against this machine: weft and the files of the command, which are read here too; the rest among hosts."""
        shared = {name: value for name, value in self._own_facts.items() if name.startswith(("weft", "file "))}
        facts = {peer.name: peer.facts for peer in peers}
        from_here = describe_differences({_LAUNCHER: shared, **facts}, reference=_LAUNCHER)
        return from_here or describe_differences(facts, reference=peers[0].name)

    def _find_silent(self) -> None:
        for peer in self.peers:
            if peer.is_ready and peer.link.silent_s > self._request.lease_s:
                self._lose(peer, f"its link has been silent for {peer.link.silent_s:.0f} s")
            elif peer.is_open and peer.why_lost and time.monotonic() - peer.tried_at > self._request.connect_timeout_s:
                self._lose(peer, peer.why_lost)

    def _lose(self, peer: Peer, why: str) -> None:
        if peer.is_open:
            peer.is_open, peer.why_lost, peer.tried_at = False, why, time.monotonic()
            peer.link.abandon()

    def _show(self, peer: Peer, message: Message) -> None:
        for line in self._output.take(peer.name, message):
            if self.log_host is not None and self.log_host.is_open:
                self.log_host.link.send("log", name=line.file, text=line.text)


@dataclass(frozen=True, kw_only=True)
class LogText:
    file: str
    text: str


class RankOutput:
    """What ranks print: rank 0's as it is, complete lines of the others with rank and host; all of it to the logs."""

    def __init__(self, stamp: str) -> None:
        self._stamp = stamp
        self._rests: dict[tuple[int, str, str], str] = {}

    def take(self, host: str, message: Message) -> list[LogText]:
        rank, stream, text = int(message["rank"]), str(message["stream"]), str(message["text"])
        terminal = sys.stdout if rank == 0 and stream == "stdout" else sys.stderr
        if rank == 0:
            print(text, end="", file=terminal, flush=True)
        else:
            self._print_lines(rank, host, stream, text)
        name = f"{self._stamp}/generation-{message['generation']}/{_as_file(host)}-rank-{rank}.{stream}"
        return [LogText(file=name, text=text)]

    def end(self) -> None:
        for (rank, host, _), rest in self._rests.items():
            if rest:
                print(f"[rank {rank} on {host}] {rest}", file=sys.stderr, flush=True)

    def _print_lines(self, rank: int, host: str, stream: str, text: str) -> None:
        key = (rank, host, stream)
        *lines, self._rests[key] = (self._rests.get(key, "") + text).split("\n")
        for line in lines:
            print(f"[rank {rank} on {host}] {line}", file=sys.stderr, flush=True)


def kept_environment() -> dict[str, str]:
    """The variables of this process that ranks on other hosts get: settings of libraries, never a rank's own."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith((*_LIBRARIES, *_SERVICES)) and not name.startswith(_NEVER_KEPT)
    }


def _joined(sentences: Sequence[str]) -> str:
    more = len(sentences) - _SHOWN_DIFFERENCES
    shown = "; ".join(sentences[:_SHOWN_DIFFERENCES])
    return f"{shown}; and {more} more hosts" if more > 0 else shown


def _as_file(host: str) -> str:
    return re.sub(r"[^\w.-]", "_", host)
