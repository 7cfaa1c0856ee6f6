"""The frame: a fixed header, a section a table, then all keys, then all values. No pickle; JSON only for control.

    header   magic | version | op | number of sections | bytes that follow the sections |
             unit | client | sequence | server version | weight | learning-rate factor
    section  table number | columns of a row | number of keys | number of rows
    body     int64 keys of every section, then float32 values of every section

Keys come before all values, so that every part is aligned wherever it lies in one buffer.
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
from weft.server.wire.sockets import send

MAGIC = b"WEFT"
VERSION = 1
NO_UNIT = -1
MAX_BODY_BYTES = 2 << 30  # a longer one is a mistake or an attack; it is refused before memory is taken
MAX_SECTIONS = 4096
UNITS = 2**32 - 1  # instead of a table's number: the section's keys are the units that an exchange is of

_HEADER = struct.Struct("<4sBBHQqQQQff")
_SECTION = struct.Struct("<IIII")
HEADER_BYTES, SECTION_BYTES = _HEADER.size, _SECTION.size  # multiples of 8: a body that follows them is aligned
NO_KEYS, NO_BODY = np.empty(0, np.int64), np.empty(0, np.uint8)


class Op(IntEnum):
    PULL = 1  # keys -> rows
    PUSH = 2  # keys and gradients -> acknowledged
    EXCHANGE = 3  # keys and differences -> fresh rows
    ASSIGN = 4  # keys and values -> acknowledged; of rows that are absent where the weight is 1
    DELETE = 5
    CONTROL = 6  # JSON -> JSON
    ROWS = 7  # (table, slots from, to) -> keys and rows
    OK = 64
    WAITING = 65  # the answer comes; why not yet, as JSON
    ERROR = 66  # a WeftError as JSON


class Section(NamedTuple):  # a tuple is made in a third of a frozen dataclass's time, and each request makes several
    """Rows of one table: a question has keys alone, its answer rows alone, a push has both."""

    table: int
    keys: NDArray[np.int64] = NO_KEYS
    values: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, dim = (0, 0) if self.values is None else self.values.shape
        return self.table, dim, self.keys.size, rows


class Frame(NamedTuple):
    op: Op
    sections: Sequence[Section] = ()
    text: bytes = b""  # instead of sections: JSON
    body: NDArray[np.uint8] = NO_BODY  # of a received frame, in one piece
    unit: int = NO_UNIT
    client: int = 0
    sequence: int = 0
    version: int = 0
    weight: float = 1.0
    lr_scale: float = 1.0

    @property
    def units(self) -> list[int]:
        """The units that a change is of: a push has one, an exchange lists many; none where a client counts instead."""
        listed = [section.keys.tolist() for section in self.sections if section.table == UNITS]
        return listed[0] if listed else [self.unit] * (self.unit != NO_UNIT)

    @property
    def tables(self) -> list[Section]:
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


class Head(NamedTuple):
    """A received frame's header."""

    op: Op
    num_sections: int
    body_bytes: int
    numbers: Sequence[Any]  # a Frame's, from `unit` on

    def frame(self) -> Frame:
        """Of an answer whose rows are where they were wanted."""
        return Frame(self.op, (), b"", NO_BODY, *self.numbers)


def control(op: Op, fields: dict[str, Any]) -> Frame:
    return Frame(op=op, text=json.dumps(fields).encode())


def send_frame(connection: socket.socket, frame: Frame) -> None:
    send(connection, frame.parts())


def logged_frame(head: bytes, body: NDArray[np.uint8]) -> Frame:
    """The frame that `Frame.head` and its body were written from."""
    found = parse_head(head[:HEADER_BYTES])
    if found.body_bytes != body.size:
        raise WireError("a frame's body does not have its length")
    return frame_of(found, shapes_of(head[HEADER_BYTES:]), body)


def frame_of(head: Head, shapes: Sequence[tuple[int, ...]], body: NDArray[np.uint8]) -> Frame:
    """The sections are views of the body."""
    if not head.num_sections:
        return Frame(head.op, (), body.tobytes(), NO_BODY, *head.numbers)
    return Frame(head.op, _sections(shapes, body), b"", body, *head.numbers)


def shapes_of(raw: Any) -> list[tuple[int, ...]]:
    return list(_SECTION.iter_unpack(raw))


def body_bytes_of(shape: tuple[int, ...]) -> int:
    """Of one section."""
    _, dim, num_keys, num_rows = shape
    return 8 * num_keys + 4 * num_rows * dim


def _sections(shapes: Sequence[tuple[int, ...]], memory: NDArray[np.uint8]) -> list[Section]:
    """Views of the body: all keys, then all values."""
    at = 8 * sum(num_keys for _, _, num_keys, _ in shapes)
    keys, first, found = memory[:at].view(np.int64), 0, []
    for table, dim, num_keys, num_rows in shapes:
        end = at + 4 * num_rows * dim
        values = memory[at:end].view(np.float32).reshape(num_rows, dim) if dim else None
        found.append(Section(table=table, keys=keys[first : first + num_keys], values=values))
        at, first = end, first + num_keys
    return found


def parse_head(raw: Any) -> Head:
    """The fixed header; what is not one is refused before memory is taken for what follows."""
    magic, version, op, num_sections, body_bytes, *numbers = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise WireError("what came is not a frame of weft")
    if version != VERSION:
        raise WireError(f"the peer speaks version {version} of the protocol, this is version {VERSION}")
    if body_bytes > MAX_BODY_BYTES or num_sections > MAX_SECTIONS or op not in Op._value2member_map_:
        raise WireError(f"a frame of {body_bytes} bytes, {num_sections} sections, operation {op} is refused")
    return Head(Op(op), num_sections, body_bytes, numbers)
