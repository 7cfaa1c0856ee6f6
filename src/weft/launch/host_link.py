"""The agent's end of its link to the launcher: orders on stdin, events on stdout, and a lease.

A line is a JSON object; an empty line is a heartbeat. The launcher has the other end (`weft.launch.ssh`). When stdin
ends, or no line has arrived for the lease, the launcher or the network is gone: the ranks are killed and this process
ends.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

Message = dict[str, Any]

BEAT_S = 1.0
_POLL_S = 0.25
_LAST_LINES_S = 5.0


class AgentLink:
    """Orders that concern a running generation are attributes; all others wait in a queue for `next_order`."""

    def __init__(self, orders_fd: int, events_fd: int) -> None:
        self.count = 0  # requests to stop, as `StopSignals` counts them
        self.ended_generation = -1  # the newest generation that the launcher has ordered to end
        self.grace_s = 0.0  # for the records of its ranks
        self.abandon: Callable[[], None] = lambda: None  # kills the ranks
        self.write_log: Callable[[str, str], None] = lambda name, text: None
        self._orders_fd, self._events_fd = orders_fd, events_fd
        self._rest = b""
        self._is_leaving = False
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._logs: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._log_writer = threading.Thread(target=self._write_logs, name="logs", daemon=True)

    def read_first(self) -> Message:
        """The first line: what the agent needs before it can answer."""
        while b"\n" not in self._rest:
            received = os.read(self._orders_fd, 65536)
            if not received:
                raise SystemExit(1)
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        first: Message = json.loads(line)
        return first

    def start(self, *, lease_s: float) -> None:
        self._log_writer.start()
        for name, work in (("orders", lambda: self._receive(lease_s)), ("heartbeat", self._beat)):
            threading.Thread(target=work, name=name, daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._receive_signal)

    def next_order(self) -> Message:
        return self._orders.get()

    def send(self, event: str, **fields: Any) -> None:
        self._write(json.dumps({"event": event, **fields}))

    def _receive(self, lease_s: float) -> None:
        heard_at = time.monotonic()
        while True:
            for line in self._lines():
                self._take(json.loads(line))
            if select.select([self._orders_fd], [], [], _POLL_S)[0]:
                received = os.read(self._orders_fd, 65536)
                if not received and self._is_leaving:  # the last lines are being written
                    return
                if not received:
                    self._end()
                self._rest += received
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > lease_s:
                self._end()

    def _lines(self) -> list[bytes]:
        *lines, self._rest = self._rest.split(b"\n")
        return [line for line in lines if line]

    def _take(self, order: Message) -> None:
        if order["order"] == "stop":
            self.count = order["count"]
        elif order["order"] == "end":
            self.grace_s = order["grace_s"]
            self.ended_generation = order["generation"]
        elif order["order"] == "log":
            self._logs.put(order)
        else:
            self._is_leaving = order["order"] == "leave"
            self._orders.put(order)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._write("")

    def _write_logs(self) -> None:
        # not in the thread of orders: a slow disk must not look like a lost launcher
        while order := self._logs.get():
            self.write_log(order["name"], order["text"])

    def finish(self) -> None:
        """Write the lines that came before the order to leave."""
        self._logs.put({})
        self._log_writer.join(_LAST_LINES_S)

    def _write(self, line: str) -> None:
        data = memoryview(line.encode() + b"\n")
        try:
            with self._sending:
                while data:
                    data = data[os.write(self._events_fd, data) :]
        except OSError:  # the launcher is gone; `_receive` ends the agent
            return

    def _receive_signal(self, number: int, frame: FrameType | None) -> None:
        self._end()

    def _end(self) -> None:
        try:
            self.abandon()
        finally:
            os._exit(1)
