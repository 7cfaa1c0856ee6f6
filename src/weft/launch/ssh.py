"""The launcher's end of a link to one host: an ssh process, orders on its stdin, events on its stdout.

Nothing is installed and nothing left there. The remote command names a program and a folder only; all else, the
environment included, goes through stdin, so that no secret is in a list of processes. The remote side ends its ranks
when stdin ends or falls silent (`weft.launch.host_link`); this side learns of a lost host from the end of ssh, or from
silence.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

from weft.core.errors import HostsError
from weft.launch.host_link import BEAT_S, Message

# The first value that ssh reads counts: options of the user cannot turn the check of host keys off.
_FIRST_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ClearAllForwardings=yes")
_LAST_OPTIONS = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3")
_AGENT = "weft.launch.host_agent"
_CONNECT_S = 10  # for the connection alone; an agent on a busy host needs longer to answer
_SSH_FAILED = 255
_NOT_FOUND = 127

Event = tuple["SshLink", Message]


def ssh_command(
    host: str,
    *,
    ssh: Sequence[str],
    options: Sequence[str],
    python: str,
    directory: str,
    connect_timeout_s: float,
    module: str = _AGENT,
) -> list[str]:
    """The words that start the agent, or another module that reads orders, on a host."""
    timeout = ("-o", f"ConnectTimeout={max(1, min(_CONNECT_S, round(connect_timeout_s)))}")
    remote = f"cd {shlex.quote(directory)} && exec {shlex.quote(python)} -m {module}"
    return [*ssh, *_FIRST_OPTIONS, *options, *timeout, *_LAST_OPTIONS, host, remote]


class SshLink:
    """One connection to a host; its events go to a queue that all hosts share, `{"event": "closed"}` last."""

    def __init__(self, host: str, command: Sequence[str], *, first: Message, events: queue.SimpleQueue[Event]) -> None:
        self.host = host
        self.heard_at = time.monotonic()
        self._events = events
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said: deque[str] = deque(maxlen=20)
        # A session of its own: Ctrl-C at the terminal is the launcher's to act on, not ssh's.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._orders.put(json.dumps(first))
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._listen, self._write)]
        for thread in self._threads:
            thread.start()

    def send(self, order: str, **fields: Any) -> None:
        self._orders.put(json.dumps({"order": order, **fields}))

    def close(self, *, patience_s: float) -> None:
        """End the session: the end of stdin ends the agent and its ranks. Then ssh itself, if it does not end."""
        self._orders.put(None)
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(patience_s)

    def abandon(self) -> None:
        """Give the session up at once: it may never end by itself."""
        self._orders.put(None)
        self._process.kill()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard_at

    def error(self) -> HostsError:
        """Why the session has ended before the agent answered."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        self._threads[1].join(1.0)
        code = self._process.poll()
        said = next((line for line in reversed(self._said) if line), "")
        if code == _SSH_FAILED:
            hint = "`ssh -o BatchMode=yes HOST true` must work for every host: its name, its key, its host key"
            return HostsError(f"{self.host} cannot be reached: {said or 'ssh ended without a message'}", hint=hint)
        if code == _NOT_FOUND or "No module named" in said or "No such file" in said:
            hint = "the same Python with weft, and the folder, must be on every host under the same paths"
            return HostsError(f"{self.host} cannot start the agent: {said}", hint=hint)
        if code is None:
            return HostsError(
                f"{self.host} has not answered for {self.silent_s:.0f} s", hint="see whether `ssh HOST true` works"
            )
        return HostsError(f"{self.host}: the agent ended with exit code {code}: {said or 'no message'}")

    def _read(self) -> None:
        with _stream(self._process.stdout) as lines:
            for line in lines:
                self.heard_at = time.monotonic()
                message = _parse(line)
                if message is not None:
                    self._events.put((self, message))
        self._events.put((self, {"event": "closed"}))

    def _listen(self) -> None:
        with _stream(self._process.stderr) as lines:
            for line in lines:
                self._said.append(line.decode(errors="replace").strip())

    def _write(self) -> None:
        pipe = _stream(self._process.stdin)
        with contextlib.suppress(OSError, ValueError):
            while True:
                try:
                    line = self._orders.get(timeout=BEAT_S)
                except queue.Empty:
                    line = ""
                if line is None:
                    break
                pipe.write(line.encode() + b"\n")
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()


def _parse(line: bytes) -> Message | None:
    """None for a heartbeat, and for a greeting of the remote shell."""
    try:
        message: Message = json.loads(line)
    except ValueError:
        return None
    return message


def _stream(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise TypeError("the process was started without pipes")
    return pipe
