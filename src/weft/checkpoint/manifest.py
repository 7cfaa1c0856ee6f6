"""manifest.json: the files and tensors of a checkpoint. Under a `step-` name it marks a complete checkpoint.

It holds no tensor data and no pickle. The chain of trust: the manifest has its own SHA-256 and that of every file.

    sha256(body) == manifest["sha256"]   and   the file's bytes == render(body)

The second condition catches altered bytes that leave the parsed value unchanged, such as blanks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core.json_files import parse_json_table

MANIFEST_NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint as it was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One global tensor, whatever its sharding was."""

    shape: tuple[int, ...]
    dtype: str  # "float32", without "torch."


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint."""

    step: int
    world_size: int
    torch_version: str
    meta: dict[str, Any]
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]

    @property
    def sha256(self) -> str:
        return _digest(_body(self))

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for record in self.files.values())


class ManifestError(ValueError):
    """The reason to reject a checkpoint."""


def render(manifest: Manifest) -> bytes:
    """The exact bytes of manifest.json."""
    fields = {**_body(manifest), "sha256": manifest.sha256}
    return (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode()


def parse(data: bytes) -> Manifest:
    """Parse a manifest, or raise the reason to reject it."""
    try:
        fields = parse_json_table(data)
        manifest = _from_fields(fields)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ManifestError(f"{MANIFEST_NAME} is not readable ({type(error).__name__}: {error})") from error
    if render(manifest) != data:
        raise ManifestError(f"{MANIFEST_NAME} does not match its own digest")
    for name in manifest.files:
        _require_plain_name(name)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a committed checkpoint."""
    path = directory / MANIFEST_NAME
    if path.is_symlink():
        raise ManifestError(f"{MANIFEST_NAME} is a link")
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"{MANIFEST_NAME} cannot be read ({error.strerror})") from error


def _body(manifest: Manifest) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(manifest)}


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _from_fields(fields: dict[str, Any]) -> Manifest:
    if fields["format"] != FORMAT:
        raise ManifestError(f"format {fields['format']} is not {FORMAT}")
    return Manifest(
        step=int(fields["step"]),
        world_size=int(fields["world_size"]),
        torch_version=str(fields["torch_version"]),
        meta=dict(fields["meta"]),
        files={name: FileRecord(**record) for name, record in fields["files"].items()},
        tensors={
            key: TensorRecord(shape=tuple(record["shape"]), dtype=str(record["dtype"]))
            for key, record in fields["tensors"].items()
        },
    )


def _require_plain_name(name: str) -> None:
    """Require plain file names: a path in a manifest must not lead out of the checkpoint's directory."""
    if name in {"", ".", "..", MANIFEST_NAME} or any(mark in name for mark in "/\\\0"):
        raise ManifestError(f"{MANIFEST_NAME} lists the file name {name!r}, which leads out of the checkpoint")
