"""The catalogue: finds TOML tables under data/ by name, checks them, and builds `Device` and `Link` values.

It does not know how a user writes a cluster (parse) nor how measurements replace figures (calibration). The file of
an entry is its name in lower case; only requested files are read.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from weft.core.cluster import Device, Link, RateCurve
from weft.core.errors import BadValueError, ConfigFileError, DeviceError, UnknownKeyError
from weft.core.json_files import parse_toml

Kind = Literal["devices", "nodes", "links"]
Table = dict[str, Any]

DATA: Final = Path(__file__).parent / "data"
LONG_NAME: Final = 5  # letters that identify a device by a part of its name
DTYPES: Final = ("float32", "tf32", "bfloat16", "float16", "float8")

# Key -> the type of its value; all are required except the OPTIONAL ones.
KEYS: Final[Mapping[Kind, Mapping[str, type]]] = {
    "devices": {
        "name": str,
        "title": str,
        "aliases": list,
        "node": str,
        "memory_gb": int,
        "memory_bytes": int,
        "memory_bytes_per_s": float,
        "memory_share": float,
        "overhead_bytes": int,
        "peak_flops": dict,
        "rates": dict,
        "sources": list,
    },
    "nodes": {
        "name": str,
        "title": str,
        "devices_per_node": int,
        "inside": str,
        "between": str,
        "host": str,
        "host_memory_bytes": int,
        "nvme_bytes_per_s": float,
        "host_cores_per_device": float,
        "host_memory_bytes_per_s": float,
        "host_core_parameters_per_s": float,
        "sources": list,
    },
    "links": {
        "name": str,
        "title": str,
        "kind": str,
        "per": str,
        "latency_s": float,
        "bytes_per_s": float,
        "duplex_share": float,
        "sources": list,
    },
}
SOURCE_KEYS: Final = ("of", "document", "date")
OPTIONAL: Final = frozenset(
    {"aliases", "title", "per", "kind", "sources"}
    | {"duplex_share", "host_cores_per_device", "host_memory_bytes_per_s", "host_core_parameters_per_s"}
)
MAY_BE_ZERO: Final = frozenset({"overhead_bytes", "latency_s", "host_memory_bytes", "nvme_bytes_per_s"})


def device_names() -> list[str]:
    """Every device of the catalogue, as its file spells it."""
    return sorted(str(_read(path)["name"]) for path in _files("devices").values())


def find_device(name: str) -> str | None:
    """The catalogue's entry for a driver's device name: 'NVIDIA H100 80GB HBM3' is H100-80GB."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    squeezed = "".join(words)

    def is_in(part: str) -> bool:
        return part in words or (len(part) >= LONG_NAME and part in squeezed)

    matching = [entry for entry in device_names() if all(map(is_in, entry.lower().split("-")))]
    return max(matching, key=len, default=None)


def fabric_names() -> list[str]:
    """Links between nodes: the names that may follow `@`."""
    return sorted(stem for stem, path in _files("links").items() if _read(path).get("kind") == "between")


def names(kind: Kind) -> list[str]:
    """Names in lower case, from the folder listing only."""
    return sorted(_files(kind))


def device_table(name: str) -> Table:
    """The table of a device by name, alias, `FAMILY-<n>GB` with another memory size, or path of a TOML file."""
    if name.endswith(".toml"):
        return user_table("devices", Path(name))
    found = _by_name_or_alias(name)
    if found is None:
        found = _with_other_memory(name)
    if found is None:
        raise _unknown_device(name)
    return found


def table(kind: Kind, name: str, *, beside: Path | None = None) -> Table:
    """The table of a node or link by name; a name ending in .toml is a file, relative to the one that names it."""
    if name.endswith(".toml"):
        return user_table(kind, (beside or Path()) / name)
    path = _files(kind).get(name.lower())
    if path is None:
        singular = kind.removesuffix("s")
        raise DeviceError(f"there is no {singular} {name!r} in the catalogue", hint=nearest(name, names(kind)))
    return dict(_read(path))


def user_table(kind: Kind, path: Path) -> Table:
    """A user's file in the catalogue's format; names in it that end in .toml are relative to it."""
    found = read_user_file(path)
    check_table(kind, found, source=str(path), partial=False)
    return found | {"beside": path.parent}


def read_user_file(path: Path) -> Table:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} cannot be read: {error}", hint="give the path of a TOML text file") from None
    except ValueError as error:
        raise ConfigFileError(
            f"{path} is not TOML: {error}", hint="strings need quotes, tables are [in brackets]"
        ) from None


def check_table(kind: Kind, found: Mapping[str, Any], *, source: str, partial: bool) -> None:
    """Raise on the first unknown, missing or ill-typed key; `partial` tables may lack keys."""
    known = KEYS[kind]
    for key, value in found.items():
        if key not in known:
            raise UnknownKeyError(f"{source}: unknown key {key!r}", hint=nearest(key, known))
        _check_value(key, value, known[key], source=source)
        if known[key] is dict:
            _check_figures(key, value, source=source)
        if key == "sources":
            _check_sources(value, source=source)
    missing = [key for key in known if key not in found and key not in OPTIONAL]
    if missing and not partial:
        raise BadValueError(f"{source}: {missing[0]} is missing", hint=f"the keys are {', '.join(known)}")


def build_device(found: Mapping[str, Any]) -> Device:
    rates = {
        dtype: RateCurve(best=curve["best"], half_flops=curve["half_flops"]) for dtype, curve in found["rates"].items()
    }
    return Device(
        name=found["name"],
        memory_bytes=found["memory_bytes"],
        memory_bytes_per_s=found["memory_bytes_per_s"],
        peak_flops=dict(found["peak_flops"]),
        rates=rates,
        memory_share=found["memory_share"],
        overhead_bytes=found["overhead_bytes"],
    )


def build_link(found: Mapping[str, Any], *, devices_per_node: int) -> Link:
    """The link, per device: a bandwidth per node is divided by the node's devices."""
    sharers = devices_per_node if found.get("per", "device") == "node" else 1
    return Link(
        name=found["name"],
        latency_s=found["latency_s"],
        bytes_per_s=found["bytes_per_s"] / sharers,
        duplex_share=found.get("duplex_share", 1.0),
    )


def sources_of(*tables: Mapping[str, Any]) -> tuple[str, ...]:
    """One line per source: `H100-80GB peak_flops: NVIDIA H100 datasheet (2023)`; estimates are marked."""
    return tuple(
        f"{found['name']} {', '.join(source['of'])}: {'estimated, ' if source.get('estimated') else ''}"
        f"{source['document']} ({source['date']})"
        for found in tables
        for source in found.get("sources", ())
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint for a name that does not exist."""
    import difflib  # imported here: it takes a millisecond, and only an error needs it

    spellings = {spelling.lower(): spelling for spelling in known}
    near = difflib.get_close_matches(name.lower(), spellings, n=1, cutoff=0.5)
    guess = f"did you mean {spellings[near[0]]!r}? " if near else ""
    return f"{guess}known: {', '.join(sorted(spellings.values(), key=str.lower))}"


def _check_value(key: str, value: Any, kind: type, *, source: str) -> None:
    accepts = (int, float) if kind is float else kind
    if not isinstance(value, accepts) or isinstance(value, bool):
        raise BadValueError(
            f"{source}: {key} is {value!r}, not a {kind.__name__}", hint="see the files of the catalogue"
        )
    if isinstance(value, int | float) and not (0 < value < float("inf") or (value == 0 and key in MAY_BE_ZERO)):
        raise BadValueError(f"{source}: {key} is {value!r}", hint="figures are positive and finite")


def _check_sources(sources: list[Any], *, source: str) -> None:
    if not all(isinstance(entry, dict) and set(SOURCE_KEYS) <= set(entry) for entry in sources):
        raise BadValueError(f"{source}: a source is incomplete", hint=f"[[sources]] has {', '.join(SOURCE_KEYS)}")


def _check_figures(key: str, figures: Mapping[str, Any], *, source: str) -> None:
    for dtype, figure in figures.items():
        if dtype not in DTYPES:
            raise UnknownKeyError(f"{source}: unknown dtype {dtype!r} in {key}", hint=nearest(dtype, DTYPES))
        if key == "rates" and not (isinstance(figure, dict) and set(figure) == {"best", "half_flops"}):
            raise BadValueError(f"{source}: rates.{dtype} is {figure!r}", hint="write { best = 0.7, half_flops = 3e9 }")
        values = figure.values() if key == "rates" else [figure]
        if not all(isinstance(value, int | float) and value > 0 for value in values):
            raise BadValueError(f"{source}: {key}.{dtype} is {figure!r}", hint="figures are positive numbers")
        if key == "rates" and figure["best"] > 1:
            raise BadValueError(
                f"{source}: rates.{dtype}.best is {figure['best']}", hint="a share of the peak, at most 1"
            )


def _by_name_or_alias(name: str) -> Table | None:
    path = _files("devices").get(name.lower()) or _file_with_alias(name)
    return dict(_read(path)) if path else None


def _file_with_alias(name: str) -> Path | None:
    quoted = f'"{name.lower()}"'
    for path in _files("devices").values():
        # Parsing every file would triple the time for common names (H100, A100): search the text before parsing.
        if quoted in path.read_text(encoding="utf-8").lower() and name.lower() in map(
            str.lower, _read(path)["aliases"]
        ):
            return path
    return None


def _with_other_memory(name: str) -> Table | None:
    """`H100-64GB`: the family's device with another memory size and the same usable share."""
    family, separator, size = name.rpartition("-")
    digits = size.lower().removesuffix("gb")
    found = _by_name_or_alias(family) if separator and digits.isdecimal() and digits != size and int(digits) else None
    if found is None:
        return None
    usable = found["memory_bytes"] * int(digits) // found["memory_gb"]
    source = {"of": ["memory_bytes"], "document": f"scaled from {found['name']}", "date": "as asked", "estimated": True}
    renamed = {"name": f"{family.upper()}-{digits}GB", "memory_gb": int(digits), "memory_bytes": usable}
    return found | renamed | {"sources": [*found["sources"], source]}


def _unknown_device(name: str) -> DeviceError:
    hint = nearest(name, device_names())
    return DeviceError(
        f"there is no device {name!r} in the catalogue",
        hint=f"{hint}; or give the path of a TOML file in the catalogue's format",
    )


@functools.cache
def _files(kind: Kind) -> dict[str, Path]:
    return {path.stem: path for path in sorted((DATA / kind).glob("*.toml"))}


@functools.cache
def _read(path: Path) -> Table:
    return tomllib.loads(path.read_text(encoding="utf-8"))
