"""How a run on parameter servers stands, asked of its coordinator and servers while it lives, of its folder after.

A live run keeps `live.json` in its folder, readable by its owner alone: where the coordinator listens, and the token.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from rich.table import Table as Grid

from weft.core.errors import RunFolderError, WeftError
from weft.core.json_files import parse_json_table
from weft.core.units import format_bytes, format_count, format_seconds
from weft.server.client import Client
from weft.server.folder import ServerFolder
from weft.server.wire.control import ControlClient
from weft.server.wire.endpoint import Endpoint

LIVE = "live.json"
_PATIENCE_S = 3.0


def keep_live(folder: Path, endpoint: Endpoint, *, token: str) -> None:
    path = folder / LIVE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"host": endpoint.host, "port": endpoint.port, "token": token, "pid": os.getpid()}, file)


def join_live(run_dir: Path) -> None:
    """A worker more for a run that is going on, in this process, until the run ends or this process does."""
    from weft.server.worker import run_worker

    try:
        told = parse_json_table((run_dir / LIVE).read_bytes())
        endpoint, token = Endpoint(told["host"], told["port"]), told["token"]
    except (OSError, ValueError, KeyError):
        raise RunFolderError(f"no run is going on in {run_dir}", hint="start it with `weft server train`") from None
    name = f"guest {socket.gethostname()} {os.getpid()}"
    run_worker(endpoint, token=token, name=name, is_guest=True)


def drop_live(folder: Path) -> None:
    (folder / LIVE).unlink(missing_ok=True)


def read_status(run_dir: Path) -> dict[str, Any]:
    """`is_live`, steps, the last record, and a row for every server and worker."""
    folder = ServerFolder(run_dir)
    if not folder.run_path.is_file():
        raise RunFolderError(
            f"{run_dir} is not the folder of a run on servers", hint="give the folder that a run wrote"
        )
    records = folder.metrics.read()
    told = {"run_dir": str(run_dir), "steps": records[-1].step if records else 0}
    last = records[-1].as_dict() if records else {}
    live = _asked(run_dir)
    if live is not None:
        return {**told, "is_live": True, "last": last, **live}
    kept = folder.read_json("server.json")
    return {
        **told,
        "is_live": False,
        "last": last,
        "servers": kept.get("servers", []),
        "workers": kept.get("workers", []),
    }


def status_table(found: dict[str, Any]) -> Grid:
    state = "running" if found["is_live"] else "not running"
    loss = found["last"].get("loss")
    title = f"{found['run_dir']}: {state}, step {found['steps']}" + (f", loss {loss:.4f}" if loss is not None else "")
    grid = Grid(title=title, title_justify="left")
    for heading in ("server", "rows", "memory", "pulled", "pushed", "busy", "up"):
        grid.add_column(heading, justify="right")
    for server in found["servers"]:
        tables = server.get("tables", [])
        busy = server.get("busy_s", 0.0) / max(1e-9, server.get("up_s", 0.0))
        grid.add_row(
            str(server.get("index", "")),
            format_count(sum(table["rows"] for table in tables)),
            format_bytes(sum(table["bytes"] for table in tables)),
            format_count(server.get("pulled_rows", 0)),
            format_count(server.get("pushed_rows", 0)),
            f"{busy:.0%}",
            format_seconds(server.get("up_s", 0.0)),
        )
    return grid


def _asked(run_dir: Path) -> dict[str, Any] | None:
    """None where nobody answers: the run has ended, or was killed and left its note behind."""
    try:
        told = parse_json_table((run_dir / LIVE).read_bytes())
        control = ControlClient(Endpoint(told["host"], told["port"]), token=told["token"], timeout_s=_PATIENCE_S)
    except (OSError, ValueError, KeyError, WeftError):
        return None
    try:
        answer = control.ask("status")
        client = Client(
            lambda index: Endpoint(*answer["endpoints"][str(index)]),
            num_servers=len(answer["endpoints"]),
            token=told["token"],
            client_id=secrets.randbits(60) + 1,
            timeout_s=_PATIENCE_S,
        )
        try:
            return {"servers": client.stats(), "workers": answer["workers"], "units_done": answer["done"]}
        finally:
            client.close()
    except (WeftError, KeyError):
        return None
    finally:
        control.close()
