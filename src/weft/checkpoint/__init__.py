"""Crash-safe checkpoints with torch's distributed checkpoint (DCP): fresh names, digests, a manifest, commit by rename.

Read in this order: layout (names), manifest, writer, saver (one save), verify, reader, store (what a run uses).
Names are imported at first use: commands read `layout` before they import torch.
"""

from typing import TYPE_CHECKING

from weft.core.lazy_names import import_when_used

if TYPE_CHECKING:
    from weft.checkpoint.manifest import Manifest as Manifest
    from weft.checkpoint.manifest import TensorRecord as TensorRecord
    from weft.checkpoint.manifest import read_manifest as read_manifest
    from weft.checkpoint.reader import read_tensors as read_tensors
    from weft.checkpoint.saver import CommittedCheckpoint as CommittedCheckpoint
    from weft.checkpoint.store import CheckpointStore as CheckpointStore
    from weft.checkpoint.store import LoadedCheckpoint as LoadedCheckpoint
    from weft.checkpoint.store import peek_newest as peek_newest

_HOMES = {
    "CheckpointStore": "weft.checkpoint.store",
    "CommittedCheckpoint": "weft.checkpoint.saver",
    "LoadedCheckpoint": "weft.checkpoint.store",
    "Manifest": "weft.checkpoint.manifest",
    "TensorRecord": "weft.checkpoint.manifest",
    "peek_newest": "weft.checkpoint.store",
    "read_manifest": "weft.checkpoint.manifest",
    "read_tensors": "weft.checkpoint.reader",
}

__all__ = sorted(_HOMES)

__getattr__ = import_when_used(__name__, _HOMES)
