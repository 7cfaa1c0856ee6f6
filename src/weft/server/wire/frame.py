"""The frame: a fixed header, one section per table, then all keys, then all values. No pickle; JSON only for control.

    header   magic | version | op | number of sections | bytes that follow the sections |
             unit | client | sequence | server version | weight | learning-rate factor
    section  table number | columns of a row | number of keys | number of rows
    body     int64 keys of every section, then float32 values of every section

Keys come before all values, so every piece is aligned wherever the frame lies in one buffer.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import WireError
from weft.core.json_files import parse_json_table
from weft.server.arrays import Keys, Rows
from weft.server.wire.sockets import receive_into, receive_some, send

MAGIC = b"WEFT"
VERSION = 1
NO_UNIT = -1
MAX_BODY_BYTES = 2 << 30  # a longer body is a mistake or an attack; refused before memory is allocated
MAX_SECTIONS = 4096
UNITS = 2**32 - 1  # instead of a table number: the keys of the section are the units of an exchange

_HEADER = struct.Struct("<4sBBHQqQQQff")
_SECTION = struct.Struct("<IIII")
HEADER_BYTES, SECTION_BYTES = _HEADER.size, _SECTION.size  # multiples of 8: a body that follows them is aligned
NO_KEYS, NO_BODY = np.empty(0, np.int64), np.empty(0, np.uint8)
_MEMORY_BYTES = 1 << 16


class Op(IntEnum):
    PULL = 1  # keys -> rows
    PUSH = 2  # keys and gradients -> acknowledged
    EXCHANGE = 3  # keys and differences -> fresh rows
    ASSIGN = 4  # keys and values -> acknowledged; weight 1: only absent rows
    DELETE = 5
    CONTROL = 6  # JSON -> JSON
    ROWS = 7  # (table, slots from, to) -> keys and rows
    OK = 64
    WAITING = 65  # the answer follows; JSON names the missing unit
    ERROR = 66  # a WeftError as JSON


class TableSection(
    NamedTuple
):  # created in a third of the time of a frozen dataclass, and each request creates several
    """Rows of one table: a pull has only keys, its answer only rows, a push has both."""

    table: int
    keys: Keys = NO_KEYS
    values: Rows | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, dim = (0, 0) if self.values is None else self.values.shape
        return self.table, dim, self.keys.size, rows


class Frame(NamedTuple):
    op: Op
    sections: Sequence[TableSection] = ()
    text: bytes = b""  # instead of sections: JSON
    body: NDArray[np.uint8] = NO_BODY  # of a received frame, contiguous
    unit: int = NO_UNIT
    client: int = 0
    sequence: int = 0
    version: int = 0
    weight: float = 1.0
    lr_scale: float = 1.0

    @property
    def units(self) -> list[int]:
        """The units of a change: a push has one, an exchange lists many; none if the client numbers its requests."""
        listed = [section.keys.tolist() for section in self.sections if section.table == UNITS]
        return listed[0] if listed else [self.unit] * (self.unit != NO_UNIT)

    @property
    def tables(self) -> list[TableSection]:
        return [section for section in self.sections if section.table != UNITS]

    def parts(self) -> list[Any]:
        """The frame as buffers; rows are not copied."""
        keys = [section.keys for section in self.sections]
        values = [section.values.reshape(-1) for section in self.sections if section.values is not None]
        return [self.head(), *keys, *values, self.text]

    def head(self) -> bytearray:
        """Header and sections: with the body's bytes they are the frame."""
        head = bytearray(_HEADER.size + _SECTION.size * len(self.sections))
        body_bytes = len(self.text)
        for number, section in enumerate(self.sections):
            _SECTION.pack_into(head, _HEADER.size + number * _SECTION.size, *section.shape)
            body_bytes += body_bytes_of(section.shape)
        numbers = (self.unit, self.client, self.sequence, self.version, self.weight, self.lr_scale)
        _HEADER.pack_into(head, 0, MAGIC, VERSION, self.op, len(self.sections), body_bytes, *numbers)
        return head

    def json(self) -> dict[str, Any]:
        try:
            return parse_json_table(self.text)
        except ValueError as error:
            raise WireError(f"a control frame does not hold a JSON object: {error}") from None


def control(op: Op, fields: dict[str, Any]) -> Frame:
    return Frame(op=op, text=json.dumps(fields).encode())


def send_frame(connection: socket.socket, frame: Frame) -> None:
    send(connection, frame.parts())


def logged_frame(head: bytes, body: NDArray[np.uint8]) -> Frame:
    """The frame of a logged head and body."""
    op, _, body_bytes, numbers = parse_head(head[:HEADER_BYTES])
    if body_bytes != body.size:
        raise WireError("a frame's body does not have its length")
    return frame_of(op, numbers, list(_SECTION.iter_unpack(head[HEADER_BYTES:])), body)


def frame_of(op: Op, numbers: Sequence[Any], shapes: Sequence[tuple[int, ...]], body: NDArray[np.uint8]) -> Frame:
    """The sections are views of the body: all keys, then all values. Without sections the body is text."""
    if not shapes:
        return Frame(op, (), body.tobytes(), NO_BODY, *numbers)
    at = 8 * sum(num_keys for _, _, num_keys, _ in shapes)
    keys, first, sections = body[:at].view(np.int64), 0, []
    for table, dim, num_keys, num_rows in shapes:
        end = at + 4 * num_rows * dim
        values = body[at:end].view(np.float32).reshape(num_rows, dim) if dim else None
        sections.append(TableSection(table=table, keys=keys[first : first + num_keys], values=values))
        at, first = end, first + num_keys
    return Frame(op, sections, b"", body, *numbers)


def body_bytes_of(shape: tuple[int, ...]) -> int:
    _, dim, num_keys, num_rows = shape
    return 8 * num_keys + 4 * num_rows * dim


def parse_head(raw: Any) -> tuple[Op, int, int, Sequence[Any]]:
    """(operation, number of sections, bytes of the body, fields of a Frame from `unit` on) of the fixed header.

    Anything else is refused before memory is allocated for the rest.
    """
    magic, version, op, num_sections, body_bytes, *numbers = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise WireError("the peer sent bytes that are not a frame of weft")
    if version != VERSION:
        raise WireError(f"the peer speaks version {version} of the protocol, this is version {VERSION}")
    if body_bytes > MAX_BODY_BYTES or num_sections > MAX_SECTIONS or op not in Op._value2member_map_:
        raise WireError(f"refused a frame of {body_bytes} bytes, {num_sections} sections, operation {op}")
    return Op(op), num_sections, body_bytes, numbers


class FrameReader:
    """The frames of one connection, in reused memory: the content of a frame is valid until the next read.

    One system call receives a short frame whole; bytes beyond it start the next frame. So a new connection needs a new
    reader. Requested rows are received straight into their target: then only their heads are read ahead.
    """

    def __init__(self) -> None:
        self._use(np.empty(_MEMORY_BYTES, np.uint8))
        self._start, self._end = 0, 0  # received bytes that belong to no frame yet

    def read(self, connection: socket.socket, *, into: Sequence[Rows] = ()) -> Frame:
        """`into`: memory for the rows of an answer, of their shapes; else they lie in the memory of the reader."""
        self._forget_last()
        most = HEADER_BYTES + SECTION_BYTES * len(into) if into else self._memory.size
        self._await(connection, HEADER_BYTES, most)
        op, num_sections, body_bytes, numbers = parse_head(self._bytes[:HEADER_BYTES])
        after_head = HEADER_BYTES + SECTION_BYTES * num_sections
        self._await(connection, after_head, after_head)
        shapes = list(_SECTION.iter_unpack(self._bytes[HEADER_BYTES:after_head]))
        if num_sections and sum(map(body_bytes_of, shapes)) != body_bytes:
            raise WireError("a frame's sections do not add up to its length")
        if into and op == Op.OK:
            self._start = after_head
            self._fill(connection, into, shapes)
            return Frame(op, (), b"", NO_BODY, *numbers)
        end = after_head + body_bytes
        self._await(connection, end, end)
        self._start = end
        return frame_of(op, numbers, shapes, self._memory[after_head:end])

    def _forget_last(self) -> None:
        """The next frame starts at the start of memory, so that its parts are aligned."""
        left = self._end - self._start
        if left:
            self._memory[:left] = self._memory[self._start : self._end].copy()
        self._start, self._end = 0, left

    def _await(self, connection: socket.socket, least: int, most: int) -> None:
        """Receives at least `least` bytes of the frame, and up to `most` if they have arrived."""
        if self._memory.size < least:
            wider = np.empty(least + least // 4, np.uint8)
            wider[: self._end] = self._memory[: self._end]
            self._use(wider)
        while self._end < least:
            self._end += receive_some(connection, self._bytes[self._end : most])

    def _fill(self, connection: socket.socket, into: Sequence[Rows], shapes: Sequence[tuple[int, ...]]) -> None:
        if [(num_rows, dim) for _, dim, num_keys, num_rows in shapes if not num_keys] != [rows.shape for rows in into]:
            raise WireError("the rows of the answer do not have the requested shape")
        for target in into:
            receive_into(connection, target)

    def _use(self, memory: NDArray[np.uint8]) -> None:
        self._memory, self._bytes = memory, memory.data
