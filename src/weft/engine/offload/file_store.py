"""`FileStore`: states in files, read ahead and written behind by a few threads in a fixed number of slots.

    slot   free -> read, and checked against its checksums -> fetched by the update -> put: written, and summed -> free

The host holds the slots and nothing else of the states: transfers bypass the page cache. With two files the states are
read from one and written to the other, which then is the current one. An error of a thread is raised by the next call.
"""

from __future__ import annotations

import functools
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

from weft.checkpoint.span_sums import span_sum
from weft.core.errors import StateFileError
from weft.engine.offload.chunks import MASTER, WEIGHT, StateBank, StateChunk
from weft.engine.offload.direct_file import RESUME, DirectFile
from weft.engine.offload.file_layout import FileLayout, FileSpan, pages
from weft.engine.offload.slab import HostMemory
from weft.engine.offload.state_store import HostStore
from weft.engine.ownership import local

THREADS = 4
_Work = list["Future[None]"]


class FileStore(HostStore):
    """See the module. `slots`: page-aligned host memory of `layout.slot_bytes` each."""

    def __init__(self, layout: FileLayout, files: Sequence[DirectFile], *, slots: Sequence[torch.Tensor]) -> None:
        self.layout, self.files, self._slots = layout, files, slots
        self._memory = [slot.numpy().data for slot in slots]
        self.sums = [np.zeros(layout.num_spans, dtype=np.uint64) for _ in files]
        self.current = 0  # the file with the newest states
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-states")
        self._unread: deque[StateChunk] = deque()
        self._reads: dict[StateChunk, tuple[int, _Work]] = {}
        self._fetched: dict[StateChunk, int] = {}  # slots
        self._put: set[StateChunk] = set()
        self._writes: list[_Work] = [[] for _ in slots]
        self._failure: BaseException | None = None
        self._is_read_only, self._is_summing = False, False
        self._maps: dict[int, mmap.mmap] = {}
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}  # by file, offset and count
        self._is_shown = False  # whether someone may have used them since `drop_maps`
        self._mapped = HostMemory()

    # --- an update ----------------------------------------------------------------------------------------------

    def begin(self, chunks: Sequence[StateChunk]) -> None:
        self.settle()
        self._unread, self._put = deque(chunks), set()
        for slot in range(len(self._slots)):
            self._read_next(slot)

    def fetch(self, chunk: StateChunk) -> dict[str, torch.Tensor]:
        slot, reads = self._reads.pop(chunk)
        self._wait(reads)
        if self._failure is not None:
            self.settle()
        self._fetched[chunk] = slot
        return {key: self._of_slot(chunk, slot, key) for key in chunk.bank.states}

    def weights_of(self, chunk: StateChunk) -> torch.Tensor | None:
        has_weights = WEIGHT in self.layout.parts[chunk]
        return self._of_slot(chunk, self._fetched[chunk], WEIGHT) if has_weights else None

    def put(self, chunk: StateChunk, stored: Callable[[], None]) -> None:
        slot = self._fetched.pop(chunk)
        if not self._is_read_only:
            target = self._target
            self._writes[slot] = [
                self._pool.submit(self._write, target, span, slot, stored) for span in self.layout.spans[chunk]
            ]
        self._put.add(chunk)
        self._read_next(slot)

    def end(self) -> None:
        self.current = self._target

    def settle(self) -> None:
        """Return when nothing is on its way; raise what went wrong."""
        self._unread.clear()
        self._wait(work for _, reads in self._reads.values() for work in reads)
        self._wait(work for writes in self._writes for work in writes)
        self._reads, self._fetched, self._writes = {}, {}, [[] for _ in self._slots]
        if self._failure is not None:
            raise self._failure

    def after_writes(self, finish: Callable[[], None]) -> Future[None]:
        """Call `finish` in a thread once what was put is on the disk."""
        writes, file = [work for writes in self._writes for work in writes], self.files[self.current]

        def run() -> None:
            for work in writes:
                work.result()
            file.sync()
            finish()

        return self._pool.submit(run)

    @property
    def _target(self) -> int:
        return (self.current + 1) % len(self.files)

    def _read_next(self, slot: int) -> None:
        if self._unread:
            chunk, source, after = self._unread.popleft(), self.current, self._writes[slot]
            spans = self.layout.spans[chunk]
            self._reads[chunk] = slot, [self._pool.submit(self._read, source, span, slot, after) for span in spans]

    def _read(self, source: int, span: FileSpan, slot: int, after: _Work) -> None:
        for write in after:  # threads take work in order, so these have begun: no thread waits for one that has not
            write.result()
        memory = self._memory[slot][span.begin : span.begin + span.nbytes]
        self.files[source].read(memory, span.offset)
        found, expected = span_sum(memory), int(self.sums[source][span.number])
        if self._is_summing:
            self.sums[source][span.number] = found
        elif found != expected:
            raise StateFileError(
                f"{self.files[source].path} was changed: bytes {span.offset} to {span.offset + span.nbytes} are not "
                "those that were written (checksum)",
                hint=RESUME,
            )

    def _write(self, target: int, span: FileSpan, slot: int, stored: Callable[[], None]) -> None:
        stored()
        memory = self._memory[slot][span.begin : span.begin + span.nbytes]
        self.sums[target][span.number] = span_sum(memory)
        self.files[target].write(memory, span.offset)

    def _wait(self, work: Iterable[Future[None]]) -> None:
        for one in work:
            self._failure = self._failure or one.exception()

    def _of_slot(self, chunk: StateChunk, slot: int, key: str) -> torch.Tensor:
        part = self.layout.parts[chunk][key]
        return self._slots[slot][part.begin : part.begin + chunk.num_elements * part.dtype.itemsize].view(part.dtype)

    # --- whole files --------------------------------------------------------------------------------------------

    def each(self, visit: Callable[[StateChunk], None] = lambda chunk: None) -> None:
        """Read the current file and check it; `visit` may look at what `fetch` has brought."""
        self._is_read_only = True
        try:
            self.begin(list(self.layout.parts))
            for chunk in self.layout.parts:
                self.fetch(chunk)
                visit(chunk)
                self.put(chunk, _nothing)
            self.settle()
        finally:
            self._is_read_only = False

    def renew(self) -> None:
        """Begin with files of zeros."""
        for file in self.files:
            file.renew()
        self.current, self._failure = 0, None
        self.sums = [np.zeros(self.layout.num_spans, dtype=np.uint64) for _ in self.files]

    def use(self, number: int, sums: Sequence[int]) -> None:
        """Continue from a file whose spans have these checksums."""
        self.current, self._failure = number, None
        self.sums[number] = np.array(sums, dtype=np.uint64)

    def weight_in_slot(self, chunk: StateChunk) -> torch.Tensor:
        """The weights of a chunk that was fetched: as they were written, or their masters."""
        return self._of_slot(chunk, self._fetched[chunk], WEIGHT if WEIGHT in self.layout.parts[chunk] else MASTER)

    def sum_up(self) -> None:
        """Take what the current file holds as right: its contents were replaced through `mapped`."""
        self._is_summing = True
        try:
            self.each()
        finally:
            self._is_summing = False

    def mapped(self, bank: StateBank, key: str, *, begin: int, count: int) -> torch.Tensor:
        """Elements of the current file as memory. It reads and writes the page cache, which `drop_maps` empties."""
        region, dtype = self.layout.regions[bank][key]
        if count == 0:
            return torch.empty(0, dtype=dtype)
        file, offset = self.files[self.current], region + begin * dtype.itemsize
        self._is_shown = True
        if (self.current, offset, count) in self._views:
            return self._views[self.current, offset, count]
        mapped = self._maps[self.current] = self._maps.get(self.current) or file.map()
        found = self._views[self.current, offset, count] = torch.frombuffer(
            mapped, dtype=dtype, count=count, offset=offset
        )
        self._mapped.add(found, functools.partial(file.release, mapped, offset, pages(found.nbytes)))
        return found

    def views_of(self, bank: StateBank, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The states of a parameter's local shard, each a tensor of its own storage: saving copies none of them."""
        own, begin = local(parameter), bank.offsets[parameter]
        return {key: self.mapped(bank, key, begin=begin, count=own.numel()).view(own.shape) for key in bank.states}

    def drop_maps(self) -> None:
        """Write what was changed through `mapped`, and free the page cache."""
        for number, mapped in self._maps.items() if self._is_shown else ():
            self.files[number].drop(mapped)
        self._is_shown = False

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for file in self.files:
            file.close()


def _nothing() -> None:
    """States that are not on their way from a device."""
