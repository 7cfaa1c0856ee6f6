"""The user's measurements: a TOML file whose figures replace those of the catalogue.

It measures nothing itself. The file is the given one, else the one named by WEFT_CALIBRATION, else
`weft.calibration.toml` in the current folder. Tables and keys are those of the catalogue; missing keys keep the
catalogue's figures, missing dtypes of peak_flops and rates too:

    measured = "2026-11-15, 8 x H200, torch 2.11"   # optional, shown among the cluster's sources

    [devices.H200]
    memory_share = 0.87              # also memory_bytes, memory_bytes_per_s, overhead_bytes, peak_flops
    [devices.H200.rates]
    bfloat16 = { best = 0.71, half_flops = 2.8e9 }

    [links.nvlink-4]
    bytes_per_s = 3.7e11             # per device and direction (per node where the link's file says so)
    latency_s = 3e-6

    [nodes.hgx-h200]
    host_memory_bytes = 1_500_000_000_000
    nvme_bytes_per_s = 2.0e10
    host_cores_per_device = 16       # also host_memory_bytes_per_s, host_core_parameters_per_s
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weft.core.errors import BadValueError, UnknownKeyError
from weft.hardware import catalogue
from weft.hardware.catalogue import Kind, Table

FILE_NAME: Final = "weft.calibration.toml"
VARIABLE: Final = "WEFT_CALIBRATION"
KINDS: Final[tuple[Kind, ...]] = ("devices", "nodes", "links")
# Keys that a calibration cannot replace: other values would describe another machine.
FIXED: Final = frozenset(
    {"name", "title", "aliases", "node", "memory_gb", "sources", "kind", "per"}
    | {"devices_per_node", "inside", "between", "host"}
)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Figures by kind and lower-case name. The empty one changes nothing."""

    source: str = ""
    tables: Mapping[Kind, Mapping[str, Table]] = field(default_factory=dict)

    def overlay(self, kind: Kind, table: Table) -> Table:
        """`table` with measured figures replaced; `calibrated`: whether there were any."""
        measured = self.tables.get(kind, {}).get(table["name"].lower(), {})
        figures = {key: _replace(table.get(key), value) for key, value in measured.items()}
        return table | figures | {"calibrated": bool(figures)}


def find(path: Path | None, *, own_names: Collection[str] = ()) -> Calibration:
    """The calibration that applies: given, named by the environment, or found in the current folder.

    `own_names`: devices of the user's own files, which a calibration may name too.
    """
    if path is None and os.environ.get(VARIABLE):
        path = Path(os.environ[VARIABLE])
    if path is None:
        path = Path(FILE_NAME)
        if not path.is_file():
            return Calibration()
    return read(path, own_names=own_names)


def read(path: Path, *, own_names: Collection[str] = ()) -> Calibration:
    """Read the file and check every key and name."""
    document = catalogue.read_user_file(path)
    for key in document:
        if key not in (*KINDS, "measured"):
            raise UnknownKeyError(f"{path}: unknown table {key!r}", hint=catalogue.nearest(key, (*KINDS, "measured")))
    tables = {kind: _tables_of(kind, document.get(kind, {}), path=path) for kind in KINDS}
    for kind in KINDS:
        _require_known(kind, tables[kind], known=(*catalogue.names(kind), *map(str.lower, own_names)), path=path)
    measured = f" ({document['measured']})" if "measured" in document else ""
    return Calibration(source=f"calibration: {path}{measured}", tables=tables)


def with_link(path: Path, name: str, figures: Mapping[str, float], *, measured: str) -> str:
    """The text of a calibration file with measured figures of a link; other tables of an existing file stay."""
    import tomli_w  # imported here: only a measurement needs it

    document: dict[str, Any] = catalogue.read_user_file(path) if path.is_file() else {}
    table = catalogue.table("links", name)
    links = document.setdefault("links", {})
    links[table["name"]] = {**links.get(table["name"], {}), **figures}
    document["measured"] = measured
    return tomli_w.dumps(document)


def _tables_of(kind: Kind, tables: Any, *, path: Path) -> dict[str, Table]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise BadValueError(f"{path}: [{kind}] must contain tables", hint=f"write [{kind}.NAME] and figures below it")
    for name, table in tables.items():
        _check(kind, name, table, path=path)
    return {name.lower(): table for name, table in tables.items()}


def _require_known(kind: Kind, names: Collection[str], *, known: Collection[str], path: Path) -> None:
    # A misspelt name would silently leave the catalogue's figures in place.
    for name in names:
        if name not in known:
            raise UnknownKeyError(
                f"{path}: [{kind}.{name}] is not in the catalogue", hint=catalogue.nearest(name, known)
            )


def _check(kind: Kind, name: str, table: Table, *, path: Path) -> None:
    fixed = sorted(FIXED & set(table))
    if fixed:
        raise BadValueError(
            f"{path}: [{kind}.{name}] cannot replace {fixed[0]}", hint="a calibration replaces measured figures only"
        )
    catalogue.check_table(kind, table, source=f"{path}: [{kind}.{name}]", partial=True)


def _replace(old: Any, new: Any) -> Any:
    return {**old, **new} if isinstance(old, dict) else new
