"""Reads a verified checkpoint: into given tensors, or one global tensor at a time.

No pickle is opened: the layout comes from index.json, and torch.load reads each chunk with weights_only=True.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from weft.checkpoint.index import read_index
from weft.checkpoint.layout import list_steps, step_path
from weft.checkpoint.manifest import Manifest, ManifestError
from weft.checkpoint.verify import check_checkpoint
from weft.core.errors import CheckpointError, WeftError, first_line


class VerifiedReader(FileSystemReader):
    """DCP's reader with given metadata, so that the pickled `.metadata` is not opened."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__(directory)
        self._metadata = read_index(directory, manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def load_into(state: dict[str, Tensor], directory: Path, manifest: Manifest, group: dist.ProcessGroup | None) -> None:
    """Fill the given tensors in place, together with the other ranks of the group."""
    try:
        reader = VerifiedReader(directory, manifest)
        if group is None:
            _load_alone(state, reader)
        else:
            dcp_load(dict(state), storage_reader=reader, planner=_planner(), process_group=group)
    except (CheckpointException, Exception) as error:
        raise unreadable(directory, error) from error


def read_tensors(path: Path, keys: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Each global tensor of a committed checkpoint in turn, on the host, for export.

    The full checkpoint is verified first; then at most one tensor is in memory.
    """
    root, step = _parse_path(path)
    verdict = check_checkpoint(root, step)
    if verdict.manifest is None:
        raise CheckpointError(f"{path.name} is damaged: {verdict.reason}.", hint=_others(root, step))
    wanted = list(verdict.manifest.tensors if keys is None else keys)
    for key in wanted:
        if key not in verdict.manifest.tensors:
            raise CheckpointError(f"{path.name} has no tensor {key!r}.", hint="Omit `keys` to read all.")
    return _stream(path, verdict.manifest, wanted)


def unreadable(directory: Path, error: BaseException) -> CheckpointError:
    """The error of a checkpoint with correct digests that does not load: another program wrote it."""
    reason = str(error) if isinstance(error, ManifestError) else first_failure(error)
    return CheckpointError(
        f"{directory.name} passed verification but cannot be read: {reason}.",
        hint="Load an older step, or write the checkpoint again with this version.",
    )


def first_failure(error: BaseException) -> str:
    """One line for an error of any rank: DCP wraps them all in one exception with stack traces."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = sorted(error.failures.items())[0]
        return f"{first_failure(cause)} (rank {rank})"
    if isinstance(error, WeftError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {Path(error.filename).name}" if error.filename else "")
    return f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__


def _stream(path: Path, manifest: Manifest, keys: list[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        reader = VerifiedReader(path, manifest)
        for key in keys:
            item: Any = reader.read_metadata().state_dict_metadata[key]
            tensor = torch.empty(item.size, dtype=item.properties.dtype)
            _load_alone({key: tensor}, reader)
            yield key, tensor
    except Exception as error:
        raise unreadable(path, error) from error


def _load_alone(state: dict[str, Tensor], reader: FileSystemReader) -> None:
    """The calls that dcp.load makes, for one process; its own no-group path warns on each call."""
    planner = _planner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    [plan] = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _planner() -> DefaultLoadPlanner:
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _parse_path(path: Path) -> tuple[Path, int]:
    for step in list_steps(path.parent):
        if step_path(path.parent, step).name == path.name:
            return path.parent, step
    raise CheckpointError(f"{path} is not a committed checkpoint.", hint=_others(path.parent, None))


def _others(root: Path, step: int | None) -> str:
    steps = [other for other in list_steps(root) if other != step]
    return f"Other checkpoints exist: steps {steps}." if steps else f"There is no other checkpoint in {root}."
