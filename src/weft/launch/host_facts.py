"""Facts of a host that must be equal on all hosts of a job, and their differences as sentences. Imports no torch.

facts of a host = python, torch, transformers, weft and the digest of its source, digests of the job's files
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import weft

Facts = dict[str, str]

_PACKAGES = ("torch", "transformers", "numpy", "safetensors")
_SOURCES = ("*.py", "*.toml", "*.json")
_MISSING = "missing"


def own_facts(files: Iterable[str] = ()) -> Facts:
    """The facts of this host; `files` are paths as the job names them."""
    versions = {name: _version(name) for name in _PACKAGES}
    own = {"weft": weft.__version__, "weft's source": _source_digest(), "python": platform.python_version()}
    return {**own, **versions, **{f"file {name}": _file_digest(Path(name)) for name in files}}


def describe_differences(facts: Mapping[str, Facts], *, reference: str) -> list[str]:
    """A sentence per host that differs from `reference`, with every value that differs."""
    expected = facts[reference]
    sentences = []
    for host, found in facts.items():
        differences = [
            f"{name} {found.get(name, _MISSING)}, not {value}"
            for name, value in expected.items()
            if found.get(name, _MISSING) != value
        ]
        if differences:
            sentences.append(f"{host} differs from {reference}: {'; '.join(differences)}")
    return sentences


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _MISSING


def _source_digest() -> str:
    root = Path(weft.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in root.rglob(pattern)):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return _MISSING
