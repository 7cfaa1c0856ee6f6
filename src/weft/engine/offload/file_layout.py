"""`FileLayout`: where each state lies in a rank's state file, and in a slot of host memory on its way.

file   one range per bank and key, in the order of the bank: the states of a parameter are one range, so that a
       checkpoint reads them as a tensor
slot   the ranges of one chunk, one behind the other, each of whole pages
span   a part of such a range: one transfer, one checksum
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.engine.offload.chunks import StateBank, StateChunk
from weft.engine.offload.direct_file import PAGE_BYTES

SPAN_BYTES = 8 << 20
Dtypes = Mapping[str, torch.dtype]


@dataclass(frozen=True, kw_only=True)
class FileSpan:
    number: int  # of its checksum
    offset: int  # in the file
    begin: int  # in the slot
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """A chunk's range of one key."""

    offset: int  # in the file
    begin: int  # in the slot
    dtype: torch.dtype


class FileLayout:
    """See the module. `dtypes_of`: the kept tensors of a bank, by key."""

    def __init__(
        self, banks: Sequence[StateBank], chunks: Sequence[StateChunk], *, dtypes_of: Callable[[StateBank], Dtypes]
    ) -> None:
        self.regions: dict[StateBank, dict[str, tuple[int, torch.dtype]]] = {}
        end = 0
        for bank in banks:
            self.regions[bank] = {}
            for key, dtype in dtypes_of(bank).items():
                self.regions[bank][key] = (end, dtype)
                end += pages(bank.num_elements * dtype.itemsize)
        self.nbytes = max(end, PAGE_BYTES)  # an empty file cannot be mapped
        self.parts: dict[StateChunk, dict[str, Part]] = {}
        self.spans: dict[StateChunk, list[FileSpan]] = {}
        self.num_spans, self.slot_bytes = 0, 0
        for chunk in chunks:
            self._add(chunk)

    def _add(self, chunk: StateChunk) -> None:
        parts, spans, begin = self.parts.setdefault(chunk, {}), self.spans.setdefault(chunk, []), 0
        for key, (region, dtype) in self.regions[chunk.bank].items():
            offset, nbytes = region + chunk.begin * dtype.itemsize, pages(chunk.num_elements * dtype.itemsize)
            if offset % PAGE_BYTES:
                raise RuntimeError(f"{key} of a chunk begins at byte {offset}, which is not a page")
            parts[key] = Part(offset=offset, begin=begin, dtype=dtype)
            for at in range(0, nbytes, SPAN_BYTES):
                size = min(SPAN_BYTES, nbytes - at)
                spans.append(FileSpan(number=self.num_spans, offset=offset + at, begin=begin + at, nbytes=size))
                self.num_spans += 1
            begin += nbytes
        self.slot_bytes = max(self.slot_bytes, begin)


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
