"""`DirectFile`: a file of fixed size whose transfers bypass the page cache (O_DIRECT), and the errors of transfers.

All its space is allocated when it is opened, so a full disk ends a run before it begins. Offsets, sizes and memory are
multiples of a page. Every error is one sentence that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

from weft.core.disk import is_full, no_space
from weft.core.errors import DiskFullError, FolderBusyError, StateFileError

PAGE_BYTES = 4096
RESUME = "continue with --resume: from the last committed step with offload.durable = 'step', else from the checkpoint"
_NO_ROOM = "free space there, or set offload.folder to another disk"


class DirectFile:
    """See the module. The file is locked while it is open, since two runs would overwrite each other's states."""

    def __init__(self, path: Path, nbytes: int, *, is_scratch: bool) -> None:
        """`is_scratch`: removed when it is closed."""
        self.path, self.nbytes = path, nbytes
        with _Named("opened", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, _close, self._descriptor, path if is_scratch else None)
        self._lock()

    @property
    def is_whole(self) -> bool:
        return os.fstat(self._descriptor).st_size == self.nbytes

    def renew(self) -> None:
        """Make it a file of zeros with all its space, whatever was there."""
        try:
            os.ftruncate(self._descriptor, 0)
            os.posix_fallocate(self._descriptor, 0, self.nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            if is_full(error) or error.errno == errno.EFBIG:
                sentence = no_space(self.path, needed_bytes=self.nbytes)
                raise DiskFullError(f"offloaded optimizer states do not fit: {sentence}", hint=_NO_ROOM) from None
            raise _failed("allocated", self.path, error) from None

    def read(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            with _Named("read", self.path):
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if count == 0:
                raise StateFileError(
                    f"{self.path} ends at byte {offset + done} of {self.nbytes}: it was cut short", hint=RESUME
                )
            done += count

    def write(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            with _Named("written", self.path):
                done += os.pwritev(self._descriptor, [memory[done:]], offset + done)

    def sync(self) -> None:
        with _Named("synced to its disk", self.path):
            os.fdatasync(self._descriptor)

    def map(self) -> mmap.mmap:
        """Its contents as memory, for checkpoints; `drop` afterwards."""
        with _Named("mapped", self.path):
            return mmap.mmap(self._descriptor, self.nbytes)

    def release(self, mapped: mmap.mmap, offset: int, nbytes: int) -> None:
        """Free the page cache of a range that was only read."""
        with _Named("read", self.path):
            mapped.madvise(mmap.MADV_DONTNEED, offset, nbytes)
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def drop(self, mapped: mmap.mmap) -> None:
        """Write what was changed in memory, and free the page cache."""
        with _Named("written", self.path):
            mapped.flush()
            mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FolderBusyError(
                f"another run keeps its optimizer states in {self.path} ({error.strerror})",
                hint="set offload.folder to a folder of this run alone",
            ) from None


class _Named(contextlib.AbstractContextManager[None]):
    """Turns errors of the system into one sentence."""

    def __init__(self, verb: str, path: Path) -> None:
        self._verb, self._path = verb, path

    def __exit__(self, _kind: object, error: BaseException | None, _at: object) -> None:
        if isinstance(error, OSError):
            raise _failed(self._verb, self._path, error) from error


def _failed(verb: str, path: Path, error: OSError) -> StateFileError | DiskFullError:
    if is_full(error):
        return DiskFullError(no_space(path), hint=_NO_ROOM)
    return StateFileError(f"{path} cannot be {verb} ({error.strerror})", hint=RESUME)


def _close(descriptor: int, scratch: Path | None) -> None:
    if scratch is not None:
        with contextlib.suppress(OSError):
            scratch.unlink()
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # mappings have descriptors of their own, which keep the lock
        os.close(descriptor)
