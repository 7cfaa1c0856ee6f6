"""Crash-safe checkpoints around torch's distributed checkpoint: fresh names, digests, a manifest, a rename as commit.

Read in this order: layout (names), manifest, writer, saver (one save), verify, reader, store (what a run uses).
Names are imported when first used: `layout` is read before a command imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.checkpoint.manifest import Manifest, TensorRecord, read_manifest
    from weft.checkpoint.reader import read_tensors
    from weft.checkpoint.saver import CommittedCheckpoint
    from weft.checkpoint.store import CheckpointStore, LoadedCheckpoint, peek_newest

_HOME = {
    "CheckpointStore": "store",
    "CommittedCheckpoint": "saver",
    "LoadedCheckpoint": "store",
    "Manifest": "manifest",
    "TensorRecord": "manifest",
    "peek_newest": "store",
    "read_manifest": "manifest",
    "read_tensors": "reader",
}

__all__ = [
    "CheckpointStore",
    "CommittedCheckpoint",
    "LoadedCheckpoint",
    "Manifest",
    "TensorRecord",
    "peek_newest",
    "read_manifest",
    "read_tensors",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"weft.checkpoint.{_HOME[name]}"), name)
    raise AttributeError(f"module 'weft.checkpoint' has no attribute {name!r}")
