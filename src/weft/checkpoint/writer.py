"""Writes with DCP's FileSystemWriter, hashes the bytes on their way to disk, and commits at the end.

    every rank: write, hash, fsync its files -> report digests with the write results
    rank 0:     .metadata, index.json, manifest.json, fsync, rename          (inside `finish`)

The digests are part of DCP's gather of write results, so the commit needs no further collective.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft.checkpoint.index import INDEX_NAME, render_index, tensor_records
from weft.checkpoint.layout import commit
from weft.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, render
from weft.core.disk import is_full, no_space
from weft.core.errors import SaveError


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """The inputs of a commit on rank 0, besides the data."""

    temporary: Path
    final: Path
    step: int
    world_size: int
    meta: dict[str, Any]


class CommittingWriter(FileSystemWriter):
    """One save into a fresh directory; when `finish` returns, the checkpoint is committed."""

    def __init__(self, job: SaveJob) -> None:
        # No copy-ahead: the data is already in host memory, and the overlapping loader would use the device's stream.
        super().__init__(job.temporary, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self._job = job
        self.fs: _DigestingFileSystem = _DigestingFileSystem()

    def storage_meta(self) -> StorageMeta:
        # The default would put the temporary path of this machine into the checkpoint.
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._naming_a_full_disk(needed_bytes=sum(map(_item_bytes, plan.items))):
            results = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results + [_digest_row(name, record) for name, record in self.fs.written.items()])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        everything = [result for of_rank in results for result in of_rank]
        data = [result for result in everything if not isinstance(result.storage_data, FileRecord)]
        files = {row.index.fqn: row.storage_data for row in everything if isinstance(row.storage_data, FileRecord)}
        with self._naming_a_full_disk():
            super().finish(metadata, [data])
            self._write(INDEX_NAME, render_index(metadata, data))
            manifest = self._manifest(metadata, files | self.fs.written)
            self._write(MANIFEST_NAME, render(manifest))
            commit(self._job.temporary, self._job.final)

    @contextmanager
    def _naming_a_full_disk(self, *, needed_bytes: int | None = None) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            own = sum(file.stat().st_size for file in self._job.temporary.glob("*"))
            root = self._job.final.parent
            raise SaveError(no_space(root, needed_bytes=needed_bytes, own_bytes=own)) from error

    def _manifest(self, metadata: Metadata, files: dict[str, FileRecord]) -> Manifest:
        return Manifest(
            step=self._job.step,
            world_size=self._job.world_size,
            torch_version=str(torch.__version__),
            meta=self._job.meta,
            files=files,
            tensors=tensor_records(metadata),
        )

    def _write(self, name: str, data: bytes) -> None:
        with self.fs.create_stream(self._job.temporary / name, "wb") as stream:
            stream.write(data)


def write_checkpoint(planner: SavePlanner, job: SaveJob, group: dist.ProcessGroup | None) -> None:
    """Write and commit, together with the other ranks of the group; DCP raises every rank's error on all ranks."""
    writer = CommittingWriter(job)
    if group is not None:
        dcp_save({}, storage_writer=writer, planner=planner, process_group=group)
        return
    # One process: the same calls that dcp.save makes. Its own no-group path warns on each call.
    planner.set_up_planner({}, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _digest_row(name: str, record: FileRecord) -> WriteResult:
    return WriteResult(index=MetadataIndex(name), size_in_bytes=record.size_bytes, storage_data=record)


class _DigestingFileSystem(FileSystem):
    """Local files, hashed as they are written and synced before they are reported."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        # "x": an existing file here means that two saves share a directory.
        with io.FileIO(path, mode.replace("w", "x")) as file:
            stream = _DigestingStream(file)
            try:
                yield stream
            except Exception as error:
                # An interrupted torch.save raises its own error: "enforce fail at inline_container.cc".
                if stream.failure is not None and stream.failure is not error:
                    raise stream.failure from error
                raise
            os.fsync(file.fileno())
        self.written[Path(path).name] = stream.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _DigestingStream(io.IOBase):
    """A write-only stream; the file system class closes it, after a sync."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):  # a raw write may be short
                written += self._file.write(view[written:]) or 0
        except OSError as error:
            self.failure = error
            raise
        self._digest.update(view)
        self._size_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        pass

    def record(self) -> FileRecord:
        return FileRecord(size_bytes=self._size_bytes, sha256=self._digest.hexdigest())
