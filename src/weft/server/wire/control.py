"""Requests and answers as JSON in authenticated frames: the channel of the coordinator. Not for rows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from weft.core.errors import ServerLostError, WeftError, WireError, error_from_dict
from weft.server.wire.frame import FrameReader, Op, control, send_frame
from weft.server.wire.handshake import connect_known
from weft.server.wire.listener import SocketListener
from weft.server.wire.sockets import Endpoint

Handler = Callable[[str, dict[str, Any]], dict[str, Any]]


class ControlServer:
    """Answers with the result of `handler(verb, fields)`; a WeftError that it raises is sent to the client."""

    def __init__(self, handler: Handler, *, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._handler = handler
        self._listener = SocketListener(self._serve, token=token, host=host, port=port)

    def start(self) -> Endpoint:
        return self._listener.start()

    def stop(self) -> None:
        self._listener.stop()

    def _serve(self, connection: socket.socket, reader: FrameReader) -> None:
        while True:
            fields = reader.read(connection).json()
            send_frame(connection, self._answer(fields))

    def _answer(self, fields: dict[str, Any]) -> Any:
        try:
            return control(Op.OK, self._handler(str(fields.pop("verb", "")), fields))
        except WeftError as error:
            return control(Op.ERROR, error.as_dict())
        except (KeyError, TypeError, ValueError) as error:
            return control(Op.ERROR, WireError(f"a request that cannot be answered: {error!r}").as_dict())


class ControlClient:
    """One connection, one request at a time; usable from several threads."""

    def __init__(self, endpoint: Endpoint, *, token: str, timeout_s: float = 60.0) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._reader = FrameReader()
        try:
            self._connection = _connect(endpoint, token)
        except OSError as error:
            raise ServerLostError(f"the coordinator at {endpoint} does not answer: {error}") from None
        self._connection.settimeout(timeout_s)

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        with self._lock:
            try:
                send_frame(self._connection, control(Op.CONTROL, {"verb": verb, **fields}))
                answer = self._reader.read(self._connection)
            except OSError as error:
                raise ServerLostError(f"the coordinator at {self._endpoint} is gone: {error}") from None
        if answer.op == Op.ERROR:
            raise error_from_dict(answer.json())
        return answer.json()

    def close(self) -> None:
        self._connection.close()


def _connect(endpoint: Endpoint, token: str) -> socket.socket:
    """Retries: a listener under a flood of unauthenticated peers may hang up on a new one."""
    pauses_s = [0.1, 0.3, 1.0]
    while True:
        try:
            return connect_known(endpoint, token, peer=f"the coordinator at {endpoint}")
        except ConnectionError as error:
            if isinstance(error, ConnectionRefusedError) or not pauses_s:
                raise
            time.sleep(pauses_s.pop(0))
