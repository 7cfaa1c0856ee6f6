"""`FrameReader`: the frames of a connection, in memory that it uses again: what a frame holds is valid until the next.

One call to the system brings a short frame whole, header, sections and keys; what came beyond a frame is the beginning
of the next. So a reader belongs to one connection, and a new connection needs a new one. Rows that were asked for go
straight to where they are wanted: then no more than their heads is read ahead.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import WireError
from weft.server.wire.frame import (
    HEADER_BYTES,
    SECTION_BYTES,
    Frame,
    Op,
    body_bytes_of,
    frame_of,
    parse_head,
    shapes_of,
)
from weft.server.wire.sockets import receive_into, receive_some

_MEMORY_BYTES = 1 << 16

Rows = NDArray[np.float32]


class FrameReader:
    def __init__(self) -> None:
        self._use(np.empty(_MEMORY_BYTES, np.uint8))
        self._start, self._end = 0, 0  # bytes that came and belong to no frame yet

    def read(self, connection: socket.socket, *, into: Sequence[Rows] = ()) -> Frame:
        """`into`: where the rows of an answer go, of just their shapes; else they lie in this reader's memory."""
        self._forget_last()
        most = HEADER_BYTES + SECTION_BYTES * len(into) if into else self._memory.size
        self._await(connection, HEADER_BYTES, most)
        head = parse_head(self._bytes[:HEADER_BYTES])
        after_head = HEADER_BYTES + SECTION_BYTES * head.num_sections
        self._await(connection, after_head, after_head)
        shapes = shapes_of(self._bytes[HEADER_BYTES:after_head])
        if head.num_sections and sum(map(body_bytes_of, shapes)) != head.body_bytes:
            raise WireError("a frame's sections do not add up to its length")
        if into and head.op == Op.OK:
            self._start = after_head
            self._fill(connection, into, shapes)
            return head.frame()
        end = after_head + head.body_bytes
        self._await(connection, end, end)
        self._start = end
        return frame_of(head, shapes, self._memory[after_head:end])

    def _forget_last(self) -> None:
        """The next frame begins where memory begins, so that its parts are aligned."""
        left = self._end - self._start
        if left:
            self._memory[:left] = self._memory[self._start : self._end].copy()
        self._start, self._end = 0, left

    def _await(self, connection: socket.socket, least: int, most: int) -> None:
        """Until `least` bytes of the frame are here; up to `most` are taken if they have come."""
        if self._memory.size < least:
            wider = np.empty(least + least // 4, np.uint8)
            wider[: self._end] = self._memory[: self._end]
            self._use(wider)
        while self._end < least:
            self._end += receive_some(connection, self._bytes[self._end : most])

    def _fill(self, connection: socket.socket, into: Sequence[Rows], shapes: Sequence[tuple[int, ...]]) -> None:
        if [(num_rows, dim) for _, dim, num_keys, num_rows in shapes if not num_keys] != [rows.shape for rows in into]:
            raise WireError("the answer's rows do not have the shape that was asked for")
        for target in into:
            receive_into(connection, target)

    def _use(self, memory: NDArray[np.uint8]) -> None:
        self._memory, self._bytes = memory, memory.data
