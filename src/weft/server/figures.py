"""server.json and ledger.json: what the run was, and what each server and worker did in it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weft import __version__
from weft.core.server_spec import ServerRun
from weft.server.client import Client
from weft.server.coordinator import Coordinator
from weft.server.step_record import ServerStepRecord

NUM_HOT = 20


def server_figures(
    *,
    client: Client,
    coordinator: Coordinator,
    tables: Sequence[str],
    evaluations: Sequence[dict[str, Any]],
    timeline: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    servers = [_server_row(stats) for stats in client.stats()]
    return {
        "servers": servers,
        "workers": [{"name": name, **figures} for name, figures in sorted(coordinator.workers.items())],
        "staleness": _merged([server["staleness"] for server in servers]),
        "hot_keys": {table: [list(pair) for pair in client.hot(table, NUM_HOT)] for table in tables},
        "evaluations": list(evaluations),
        "timeline": list(timeline),
        "events": coordinator.events,
    }


def ledger_of(
    run: ServerRun,
    records: Sequence[ServerStepRecord],
    figures: dict[str, Any],
    *,
    status: str,
    elapsed_s: float,
    train_s: float,
    folder: Path,
) -> dict[str, Any]:
    last = figures["evaluations"][-1] if figures["evaluations"] else {}
    samples_per_s = sum(record.samples_per_s * record.step_s for record in records)
    seconds = sum(record.step_s for record in records)
    return {
        "kind": "server",
        "run_dir": str(folder),
        "run": {
            "status": status,
            "steps": records[-1].step if records else 0,
            "first_loss": records[0].loss if records else None,
            "final_loss": records[-1].loss if records else None,
            "eval_loss": last.get("loss"),
            "auc": last.get("auc"),
            "samples_per_s": samples_per_s / seconds if seconds else 0.0,
            "train_s": train_s,
            "elapsed_s": elapsed_s,
            "mode": run.server.mode,
            "servers": run.server.servers,
            "workers": run.server.workers,
            "launcher": run.server.launcher,
        },
        "rows": sum(server["rows"] for server in figures["servers"]),
        "bytes": sum(server["bytes"] for server in figures["servers"]),
        "restarts": sum(event["event"] in ("worker lost", "server lost") for event in figures["events"]),
        "machine": {"platform": platform.platform(), "python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    return {"weft": __version__, **{name: version(name) for name in ("torch", "numpy", "numba")}}


def _server_row(stats: dict[str, Any]) -> dict[str, Any]:
    """A server's counters, with its rates since it came up."""
    up_s = max(1e-9, float(stats.get("up_s", 0.0)))
    tables = stats.get("tables", [])
    return {
        **stats,
        "rows": sum(table["rows"] for table in tables),
        "bytes": sum(table["bytes"] for table in tables),
        "pulled_rows_per_s": stats.get("pulled_rows", 0) / up_s,
        "pushed_rows_per_s": stats.get("pushed_rows", 0) / up_s,
        "load": stats.get("busy_s", 0.0) / up_s,
    }


def _merged(histograms: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update({int(tau): count for tau, count in histogram.items()})
    return {str(tau): total[tau] for tau in sorted(total)}
