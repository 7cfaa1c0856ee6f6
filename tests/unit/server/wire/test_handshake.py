"""Both sides have the token, or neither goes on; a server that dies in between has refused nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from weft.core.errors import TokenError
from weft.server.wire.handshake import connect_known
from weft.server.wire.listener import SocketListener
from weft.server.wire.sockets import Endpoint


def served(answer: Callable[[socket.socket], None]) -> Endpoint:
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, listening:
            answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    return Endpoint(*listening.getsockname()[:2])


def test_a_wrong_token_is_told_on_both_sides() -> None:
    listener = SocketListener(lambda connection, reader: None, token="right", host="127.0.0.1", port=0)
    endpoint = listener.start()
    connect_known(endpoint, "right", peer="it").close()
    with pytest.raises(TokenError, match="it has another token"):
        connect_known(endpoint, "wrong", peer="it")
    listener.stop()


def test_a_server_that_dies_before_its_last_word_has_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    from weft.server.wire import handshake

    def dies(connection: socket.socket) -> None:
        hello = connection.recv(1024)
        mine = bytes(16)
        connection.sendall(mine + handshake._proof("right", b"server", hello[5:] + mine))
        connection.recv(hashlib.sha256().digest_size)  # and no more

    with pytest.raises(ConnectionError):
        connect_known(served(dies), "right", peer="it")
