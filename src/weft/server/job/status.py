"""The status of a run on parameter servers: from its coordinator and servers while it runs, from its folder afterwards.

A running job keeps `live.json` in its folder, readable by its owner alone: the endpoint of the coordinator, the token.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from rich.table import Table as Grid

from weft.core.errors import RunFolderError, WeftError
from weft.core.json_files import parse_json_table
from weft.core.units import format_bytes, format_count, format_seconds
from weft.server.client import Client
from weft.server.job.records import ServerFolder, server_row
from weft.server.wire.control import ControlClient
from weft.server.wire.sockets import Endpoint
from weft.train.folder.run_folder import read_json

LIVE = "live.json"
_PATIENCE_S = 3.0


def keep_live(folder: Path, endpoint: Endpoint, *, token: str) -> None:
    path = folder / LIVE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"host": endpoint.host, "port": endpoint.port, "token": token, "pid": os.getpid()}, file)


def join_live(run_dir: Path) -> None:
    """Adds a worker in this process to a running job, until the job or this process ends."""
    from weft.server.worker.worker import run_worker

    try:
        endpoint, token = _read_live(run_dir)
    except (OSError, ValueError, KeyError):
        raise RunFolderError(f"no run is going on in {run_dir}", hint="start it with `weft server train`") from None
    run_worker(endpoint, token=token, name=f"guest {socket.gethostname()} {os.getpid()}", is_guest=True)


def _read_live(run_dir: Path) -> tuple[Endpoint, str]:
    fields = parse_json_table((run_dir / LIVE).read_bytes())
    return Endpoint(fields["host"], fields["port"]), fields["token"]


def drop_live(folder: Path) -> None:
    (folder / LIVE).unlink(missing_ok=True)


def read_status(run_dir: Path) -> dict[str, Any]:
    """`is_live`, steps, the last record, and one row per server and worker."""
    folder = ServerFolder(run_dir)
    if not folder.run_path.is_file():
        raise RunFolderError(
            f"{run_dir} is not the folder of a run on servers", hint="give the folder that a run wrote"
        )
    records = folder.metrics.read()
    steps, last = (records[-1].step, records[-1].as_dict()) if records else (0, {})
    live = _ask_live(run_dir)
    kept = read_json(folder.figures_path) if live is None else {}
    found = live or {"servers": kept.get("servers", []), "workers": kept.get("workers", [])}
    return {"run_dir": str(run_dir), "steps": steps, "is_live": live is not None, "last": last, **found}


def status_table(found: dict[str, Any]) -> Grid:
    state = "running" if found["is_live"] else "not running"
    loss = found["last"].get("loss")
    title = f"{found['run_dir']}: {state}, step {found['steps']}" + (f", loss {loss:.4f}" if loss is not None else "")
    grid = Grid(title=title, title_justify="left")
    for heading in ("server", "rows", "memory", "pulled", "pushed", "busy", "up"):
        grid.add_column(heading, justify="right")
    for server in map(server_row, found["servers"]):
        grid.add_row(
            str(server.get("index", "")),
            format_count(server["rows"]),
            format_bytes(server["bytes"]),
            format_count(server.get("pulled_rows", 0)),
            format_count(server.get("pushed_rows", 0)),
            f"{server['load']:.0%}",
            format_seconds(server.get("up_s", 0.0)),
        )
    return grid


def _ask_live(run_dir: Path) -> dict[str, Any] | None:
    """None if there is no answer: the run has ended, or was killed and left its file behind."""
    with ExitStack() as stack, suppress(OSError, ValueError, KeyError, WeftError):
        endpoint, token = _read_live(run_dir)
        control = stack.enter_context(closing(ControlClient(endpoint, token=token, timeout_s=_PATIENCE_S)))
        answer = control.ask("status")
        client = Client(
            lambda index: Endpoint(*answer["endpoints"][str(index)]),
            num_servers=len(answer["endpoints"]),
            token=token,
            client_id=secrets.randbits(60) + 1,
            timeout_s=_PATIENCE_S,
        )
        stack.enter_context(closing(client))
        return {"servers": client.stats(), "workers": answer["workers"], "units_done": answer["done"]}
    return None
