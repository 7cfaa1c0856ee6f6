"""`python -m weft.server.main server|worker HOST PORT NAME`: what the launcher of processes starts.

The token comes through the environment, never the command line, where every user of the machine could read it.
"""

from __future__ import annotations

import os
import sys
import threading

from weft.core.errors import WeftError
from weft.server.wire.descriptors import raise_limit
from weft.server.wire.endpoint import Endpoint
from weft.train.launcher_death import end_with_launcher

TOKEN_VARIABLE = "WEFT_SERVER_TOKEN"


def main(arguments: list[str]) -> int:
    role, host, port, name = arguments
    end_with_launcher(os.environ)
    raise_limit()
    token = os.environ.pop(TOKEN_VARIABLE)
    coordinator = Endpoint(host, int(port))
    try:
        if role == "server":
            _serve(coordinator, token=token, index=int(name))
        else:
            _work(coordinator, token=token, name=name)
    except WeftError as error:  # the coordinator has been told, or is gone
        print(f"error [{error.code}]: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def _serve(coordinator: Endpoint, *, token: str, index: int) -> None:
    from weft.server.server_process import start_server

    start_server(coordinator, token=token, index=index)
    threading.Event().wait()  # its connections have threads of their own; the launcher ends it


def _work(coordinator: Endpoint, *, token: str, name: str) -> None:
    import torch

    from weft.core.quiet import quiet_libraries
    from weft.server.worker import run_worker

    quiet_libraries()
    torch.set_num_threads(1)  # workers are the parallelism
    run_worker(coordinator, token=token, name=name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
