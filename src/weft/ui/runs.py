"""The runs below a folder, and the line of each in the table of runs: its state, its last step, its documents' facts.

A run is a folder with metrics.jsonl or run.toml. A page names runs by their path relative to the folder; only names
that this list contains are ever opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.core.errors import InputError, RunFolderError
from weft.core.json_files import parse_json_table, parse_toml
from weft.core.lock_file import STALE_S, read_owner
from weft.core.plan import Plan
from weft.core.processes import is_running
from weft.report.fields import count, number, table, word
from weft.report.folder import EXPERTS, LEDGER, METRICS, PIPELINE, PLAN, RUN, SERVER
from weft.ui.values import VALUES

MAX_DEPTH = 3  # levels of folders below the given one
MAX_RUNS = 2_000
LOCK, LIVE = "run.lock", "live.json"
TAIL_BYTES = 8192
SHOWN = ("loss", "tokens_per_s", "samples_per_s", "step_s", "peak_memory_bytes", "learning_rate", "grad_norm")


def require_folder(folder: Path) -> None:
    """Require a folder that can be read."""
    if not folder.is_dir():
        raise RunFolderError(
            f"there is no folder {folder}", hint="give a folder of runs: weft ui runs; `weft train --out` makes one"
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise RunFolderError(f"{folder} cannot be read", hint="check its permissions")


def find_runs(folder: Path) -> dict[str, Path]:
    """Runs by name: the folder itself (its own name), or folders below it (their relative paths)."""
    if is_run(folder):
        return {folder.resolve().name: folder}
    found = {str(path.relative_to(folder)): path for path in _below(folder, depth=MAX_DEPTH)}
    return dict(sorted(found.items())[:MAX_RUNS])


def is_run(path: Path) -> bool:
    return (path / METRICS).is_file() or (path / RUN).is_file()


def _below(folder: Path, *, depth: int) -> Iterator[Path]:
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in inside:
        if is_run(path):
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from _below(path, depth=depth - 1)


class RunList:
    """The runs of a folder; documents are read again when they change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def paths(self) -> dict[str, Path]:
        return find_runs(self.folder)

    def rows(self) -> list[dict[str, Any]]:
        """One row per run, for the table."""
        return [self._row(name, path) for name, path in self.paths().items()]

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        last, last_eval = read_last(path / METRICS)
        facts = dict(self._documents(name, path))
        facts["status"] = _live_status(path) or facts.get("status") or ("unknown" if last else "not started")
        seen = {key: value for key in SHOWN if (value := number(last.get(key))) is not None}
        has = [part for part, file in (("pipeline", PIPELINE), ("experts", EXPERTS)) if (path / file).is_file()]
        return {
            "name": name,
            **facts,
            **seen,
            **({"eval_loss": last_eval} if last_eval is not None else {}),
            "step": count(last.get("step")) or 0,
            "size": _size(path / METRICS),
            "updated": _changed(path / METRICS),
            "has": has,
            "fields": [key for key in VALUES if number(last.get(key)) is not None],
        }

    def _documents(self, name: str, path: Path) -> dict[str, Any]:
        state = tuple(_changed_ns(path / file) for file in (RUN, PLAN, LEDGER))
        known = self._known.get(name)
        if known is None or known[0] != state:
            known = self._known[name] = (state, read_documents(path))
        return known[1]


def read_documents(path: Path) -> dict[str, Any]:
    """Facts of run.toml, plan.toml and ledger.json; none of a file that is missing or damaged."""
    run, plan, ledger = _toml(path / RUN), _toml(path / PLAN), _json(path / LEDGER)
    facts, model, train = table(ledger, "run"), table(run, "model"), table(run, "train")
    named = word(table(ledger, "model").get("name")) or word(model.get("type")) or word(model.get("path"))
    is_server = isinstance(run.get("server"), dict) or (path / SERVER).is_file()
    found = {
        "kind": "server" if is_server else "training",
        "status": word(facts.get("status")),
        "model": named or word(model.get("kind")),
        "plan": word(facts.get("strategy")) or _strategy(plan),
        "ranks": count(facts.get("num_ranks")),
        "device": word(facts.get("device_name")) or word(facts.get("device")),
        "steps": count(train.get("steps")),
        "parameters": count(table(ledger, "model").get("parameters")),
        "mfu": number(table(ledger, "time").get("mfu")),
    }
    return {key: value for key, value in found.items() if value is not None}


def read_last(path: Path) -> tuple[dict[str, Any], float | None]:
    """The last whole line of metrics.jsonl, and the last held-out loss near its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}, None
    found = [fields for fields in map(_fields, lines) if count(fields.get("step")) is not None]
    losses = [value for fields in found if (value := number(fields.get("eval_loss"))) is not None]
    return (found[-1] if found else {}), (losses[-1] if losses else None)


def _live_status(path: Path) -> str | None:
    """ "running" while a process holds the run's lock or serves it."""
    owner = read_owner(path / LOCK)
    if owner is not None:
        is_alive = not owner.is_gone if owner.is_here else _age_s(path / LOCK) < STALE_S
        return "running" if is_alive else None
    pid = count(_json(path / LIVE).get("pid"))
    return "running" if pid and is_running(pid, start=0) else None


def _strategy(plan: dict[str, Any]) -> str | None:
    try:
        return Plan.from_tables(plan).strategy_name if plan else None
    except InputError:  # a plan of another version
        return None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        return parse_json_table(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _fields(line: bytes) -> dict[str, Any]:
    try:
        return parse_json_table(line)
    except ValueError:
        return {}


def _age_s(path: Path) -> float:
    return time.time() - _changed(path)


def _changed(path: Path) -> float:
    return _changed_ns(path) / 1e9


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
