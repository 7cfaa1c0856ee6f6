"""Crash-safe checkpoints around torch's distributed checkpoint: fresh names, digests, a manifest, a rename as commit.

Read in this order: layout (names), manifest, writer, saver (one save), verify, reader, store (what a run uses).
"""

from weft.checkpoint.manifest import Manifest, TensorRecord, read_manifest
from weft.checkpoint.reader import read_tensors
from weft.checkpoint.saver import CommittedCheckpoint
from weft.checkpoint.store import CheckpointStore, LoadedCheckpoint, peek_newest

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
