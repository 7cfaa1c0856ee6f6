"""A server's side of a run: learn from the coordinator what to hold, restore it, listen, say where.

It imports no torch: a server starts, and starts again, in well under a second.
"""

from __future__ import annotations

from pathlib import Path

from weft.core.errors import WeftError
from weft.server.node.server import Server
from weft.server.node.spec import NodeSpec
from weft.server.wire.control import ControlClient
from weft.server.wire.endpoint import Endpoint


def start_server(coordinator: Endpoint, *, token: str, index: int, host: str = "127.0.0.1") -> Server:
    """A listening, registered server. An error is told to the coordinator, then raised."""
    control = ControlClient(coordinator, token=token)
    try:
        told = control.ask("serve")
        folder = Path(told["out"]) / "servers" / str(index)
        server = Server(index=index, spec=NodeSpec(**told["node"]), folder=folder, token=token, host=host)
        endpoint = server.start()
        control.ask("register", server=index, host=endpoint.host, port=endpoint.port)
        return server
    except WeftError as error:
        control.ask("fail", who=f"server {index}", error=error.as_dict())
        raise
    finally:
        control.close()
