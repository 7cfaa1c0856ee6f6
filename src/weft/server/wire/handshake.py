"""Both sides prove that they have the token of the job, without sending it: HMAC-SHA256 over two nonces.

client -> WEFT, version, nonce c          server -> nonce s, HMAC(token, "server" c s)
client -> HMAC(token, "client" c s)       server -> one byte: 1
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

from weft.core.errors import TokenError, WireError
from weft.server.wire.frame import MAGIC, VERSION
from weft.server.wire.sockets import Endpoint, connect, receive

HANDSHAKE_S = 5.0  # for the whole handshake: a silent or slow peer occupies a thread no longer
_NONCE = 16
_HELLO = struct.Struct(f"<4sB{_NONCE}s")
_WELCOME = b"\x01"


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(token.encode(), side + nonces, hashlib.sha256).digest()


def greet(connection: socket.socket, token: str, *, peer: str) -> None:
    """The client's side; raises TokenError if the two tokens differ."""
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(_HELLO.pack(MAGIC, VERSION, mine))
    answer = receive(connection, _NONCE + hashlib.sha256().digest_size)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(token, b"server", mine + theirs)):
        raise TokenError(f"{peer} has another token", hint="is it the server of another job?")
    connection.sendall(_proof(token, b"client", mine + theirs))
    # A refusal is sent; a connection that ends without one is a server that has just died, and is retried.
    if receive(connection, 1) != _WELCOME:
        raise TokenError(f"{peer} refused the token", hint="give the token of that server's job")


def connect_known(endpoint: Endpoint, token: str, *, peer: str) -> socket.socket:
    """An authenticated connection; closed again if the handshake fails."""
    connection = connect(endpoint, timeout_s=HANDSHAKE_S)
    try:
        greet(connection, token, peer=peer)
    except BaseException:
        connection.close()
        raise
    return connection


def admit(connection: socket.socket, token: str) -> None:
    """The server's side; raises WireError, TokenError or TimeoutError, after which the connection is closed.

    An authenticated peer may be silent for any time.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    magic, version, theirs = _HELLO.unpack(receive(connection, _HELLO.size, deadline=deadline))
    if magic != MAGIC or version != VERSION:
        raise WireError("the peer does not speak weft's protocol")
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(mine + _proof(token, b"server", theirs + mine))
    proof = receive(connection, hashlib.sha256().digest_size, deadline=deadline)
    if not hmac.compare_digest(proof, _proof(token, b"client", theirs + mine)):
        raise TokenError("a peer has another token")
    connection.sendall(_WELCOME)
    connection.settimeout(None)
