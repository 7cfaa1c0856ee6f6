"""A listening socket with a thread a connection; who passes the handshake is given to `serve`.

Whatever a peer sends, the listener goes on: garbage, a wrong token or a lost connection end that connection alone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from weft.core.errors import WeftError
from weft.server.wire.endpoint import Endpoint
from weft.server.wire.frame import Op, control, send_frame
from weft.server.wire.handshake import HANDSHAKE_S, admit
from weft.server.wire.reader import FrameReader
from weft.server.wire.sockets import tune

Serve = Callable[[socket.socket, FrameReader], None]  # until it raises ConnectionError


class Listener:
    def __init__(self, serve: Serve, *, token: str, host: str, port: int) -> None:
        self._serve = serve
        self._token = token
        self._wanted = (host, port)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._socket: socket.socket | None = None
        self.num_refused = 0  # peers that did not pass the handshake, or sent what is not a frame

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
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
            end.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if self._socket is None:
                    return
                continue  # out of file descriptors, or a peer that went away again: others may still come
            with self._lock:
                if self._socket is None:
                    connection.close()
                    return
                self._open.add(connection)
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        try:
            tune(connection)
            connection.settimeout(HANDSHAKE_S)
            admit(connection, self._token)
            connection.settimeout(None)
            self._serve(connection, FrameReader())
        except WeftError as error:
            self.num_refused += 1
            with contextlib.suppress(OSError):
                send_frame(connection, control(Op.ERROR, error.as_dict()))
        except OSError:
            pass  # the peer went away: its own side says so
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
