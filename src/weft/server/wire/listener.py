"""A listening socket with one thread per connection; `serve` gets each authenticated connection.

Garbage, a wrong token or a lost connection ends that connection alone. Unauthenticated peers are bounded in number and
time, and the oldest is dropped first: they cannot take the threads and descriptors that workers, the log and snapshots
need. An authenticated peer is never dropped, however long it is silent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from weft.core.errors import WeftError
from weft.server.wire.frame import FrameReader, Op, control, send_frame
from weft.server.wire.handshake import admit
from weft.server.wire.sockets import Endpoint, is_in_reserve, tune

MAX_PENDING = 64  # a handshake takes a millisecond: a job of thousands of workers has few at a time
_ACCEPT_RETRY_S = 0.05

Serve = Callable[[socket.socket, FrameReader], None]  # until it raises ConnectionError


class SocketListener:
    def __init__(self, serve: Serve, *, token: str, host: str, port: int) -> None:
        self._serve = serve
        self._token = token
        self._wanted = (host, port)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._pending: dict[socket.socket, None] = {}  # open and not authenticated; oldest first
        self._socket: socket.socket | None = None
        self.num_refused = 0  # peers with another token, or that sent no frame
        self.num_hung_up = 0  # peers that left, timed out, or were dropped for others

    def start(self) -> Endpoint:
        host, port = self._wanted
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        threading.Thread(target=self._accept, args=(self._socket,), daemon=True).start()
        return Endpoint(host, self._socket.getsockname()[1])

    def stop(self) -> None:
        with self._lock:
            ends = [*self._open, *([self._socket] if self._socket else [])]
            self._socket = None
        for end in ends:
            _wake(end)
            end.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if self._socket is None:
                    return
                # Out of descriptors, or the peer has left. Without a pause the loop would take a whole core.
                self._hang_up_oldest()
                time.sleep(_ACCEPT_RETRY_S)
                continue
            if not self._take(connection):
                return

    def _take(self, connection: socket.socket) -> bool:
        """A thread for a new peer, if there is room; False when the listener has stopped."""
        is_short = is_in_reserve(connection.fileno())
        if (is_short or len(self._pending) >= MAX_PENDING) and not self._hang_up_oldest():
            self.num_hung_up += 1  # all others are authenticated
            connection.close()
            return True
        with self._lock:
            if self._socket is None:
                connection.close()
                return False
            self._open.add(connection)
            self._pending[connection] = None
        threading.Thread(target=self._attend, args=(connection,), daemon=True).start()
        return True

    def _hang_up_oldest(self) -> bool:
        """Drops the oldest unauthenticated peer; False if there is none."""
        with self._lock:
            oldest = next(iter(self._pending), None)
            if oldest is None:
                return False
            del self._pending[oldest]
            _wake(oldest)
            oldest.close()  # here, not in its thread: late threads would let a flood reach the reserve
        return True

    def _attend(self, connection: socket.socket) -> None:
        is_known = False
        try:
            tune(connection)
            admit(connection, self._token)
            is_known = self._admitted(connection)
            if is_known:
                self._serve(connection, FrameReader())
        except WeftError as error:
            self.num_refused += 1
            with contextlib.suppress(OSError):
                send_frame(connection, control(Op.ERROR, error.as_dict()))
        except OSError:  # the peer has left, and reports it on its side
            self.num_hung_up += not is_known
        finally:
            with self._lock:
                self._open.discard(connection)
                self._pending.pop(connection, None)
            connection.close()

    def _admitted(self, connection: socket.socket) -> bool:
        """Whether the authenticated peer was not dropped meanwhile."""
        with self._lock:
            is_pending = connection in self._pending
            self._pending.pop(connection, None)
        return is_pending


def _wake(end: socket.socket) -> None:
    """Wakes the thread that waits on this socket."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
