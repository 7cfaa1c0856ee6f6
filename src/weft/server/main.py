"""`python -m weft.server.main server|worker HOST PORT NAME`: the processes that the process launcher starts.

The token comes through the environment, never the command line, which every user of the machine could read. A server
imports no torch: it starts, and restarts, in well under a second.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from weft.core.errors import WeftError
from weft.server.node.server import Server
from weft.server.node.state import NodeSpec
from weft.server.wire.control import ControlClient
from weft.server.wire.sockets import Endpoint, raise_limit
from weft.train.ranks.launcher_death import end_with_launcher

TOKEN_VARIABLE = "WEFT_SERVER_TOKEN"


def start_server(coordinator: Endpoint, *, token: str, index: int, host: str = "127.0.0.1") -> Server:
    """A listening, registered server. An error is reported to the coordinator, then raised."""
    control = ControlClient(coordinator, token=token)
    try:
        assignment = control.ask("serve")
        folder = Path(assignment["out"]) / "servers" / str(index)
        server = Server(index=index, spec=NodeSpec(**assignment["node"]), folder=folder, token=token, host=host)
        endpoint = server.start()
        control.ask("register", server=index, host=endpoint.host, port=endpoint.port)
        return server
    except WeftError as error:
        control.ask("fail", who=f"server {index}", error=error.as_dict())
        raise
    finally:
        control.close()


def main(arguments: list[str]) -> int:
    role, host, port, name = arguments
    end_with_launcher(os.environ)
    raise_limit()
    token = os.environ.pop(TOKEN_VARIABLE)
    coordinator = Endpoint(host, int(port))
    try:
        if role == "server":
            start_server(coordinator, token=token, index=int(name))
            threading.Event().wait()  # connections have their own threads; the launcher ends this process
        else:
            _work(coordinator, token=token, name=name)
    except WeftError as error:  # reported to the coordinator
        print(f"error [{error.code}]: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def _work(coordinator: Endpoint, *, token: str, name: str) -> None:
    import torch

    from weft.core.quiet import quiet_libraries
    from weft.server.worker.worker import run_worker

    quiet_libraries()
    torch.set_num_threads(1)  # workers are the parallelism
    run_worker(coordinator, token=token, name=name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
