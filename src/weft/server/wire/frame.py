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
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import WireError
from weft.server.wire.sockets import receive, receive_into, send

MAGIC = b"WEFT"
VERSION = 1
NO_UNIT = -1
MAX_BODY_BYTES = 2 << 30  # a longer one is a mistake or an attack; it is refused before memory is taken
MAX_SECTIONS = 4096
UNITS = 2**32 - 1  # instead of a table's number: the section's keys are the units that an exchange is of

_HEADER = struct.Struct("<4sBBHQqQQQff")
_SECTION = struct.Struct("<IIII")


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


@dataclass(frozen=True, kw_only=True)
class Section:
    """Rows of one table: a question has keys alone, its answer rows alone, a push has both."""

    table: int
    keys: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    values: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, dim = (0, 0) if self.values is None else self.values.shape
        return self.table, dim, self.keys.size, rows


@dataclass(frozen=True, kw_only=True)
class Frame:
    op: Op
    sections: Sequence[Section] = ()
    text: bytes = b""  # instead of sections: JSON
    body: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))  # of a received frame, in one piece
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
            body_bytes += _body_bytes(section.shape)
        numbers = (self.unit, self.client, self.sequence, self.version, self.weight, self.lr_scale)
        _HEADER.pack_into(head, 0, MAGIC, VERSION, self.op, len(self.sections), body_bytes, *numbers)
        return head

    def json(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.text)
        except ValueError:
            raise WireError("a control frame does not hold JSON") from None
        if not isinstance(fields, dict):
            raise WireError("a control frame does not hold a JSON object")
        return fields


def control(op: Op, fields: dict[str, Any]) -> Frame:
    return Frame(op=op, text=json.dumps(fields).encode())


def send_frame(connection: socket.socket, frame: Frame) -> None:
    send(connection, frame.parts())


@dataclass
class FrameReader:
    """Reads frames of one connection into memory that it uses again: what a frame holds is valid until the next."""

    _head: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    _memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(1 << 16, np.uint8))

    def read(self, connection: socket.socket, *, into: Sequence[NDArray[np.float32]] = ()) -> Frame:
        """`into`: where the rows of an answer go, of just their shapes; else they lie in this reader's memory."""
        receive_into(connection, self._head)
        op, num_sections, body_bytes, numbers = _parse_header(self._head)
        shapes = list(_SECTION.iter_unpack(receive(connection, num_sections * _SECTION.size)))
        if num_sections:
            return self._with_sections(connection, op, shapes, body_bytes, numbers, into)
        return Frame(op=op, text=receive(connection, body_bytes), **numbers)

    def _with_sections(
        self,
        connection: socket.socket,
        op: Op,
        shapes: Sequence[tuple[int, ...]],
        body_bytes: int,
        numbers: dict[str, Any],
        into: Sequence[NDArray[np.float32]],
    ) -> Frame:
        if sum(map(_body_bytes, shapes)) != body_bytes:
            raise WireError("a frame's sections do not add up to its length")
        if into:
            for target in _fitting(into, shapes):
                receive_into(connection, target)
            return Frame(op=op, **numbers)
        memory = self._room_for(body_bytes)
        receive_into(connection, memory)
        return Frame(op=op, sections=_sections(shapes, memory), body=memory, **numbers)

    def _room_for(self, size: int) -> NDArray[np.uint8]:
        if self._memory.size < size:
            self._memory = np.empty(size + size // 4, np.uint8)
        return self._memory[:size]


def frame_of(head: bytes, body: NDArray[np.uint8]) -> Frame:
    """The frame that `Frame.head` and its body were written from."""
    op, num_sections, body_bytes, numbers = _parse_header(head[: _HEADER.size])
    if body_bytes != body.size:
        raise WireError("a frame's body does not have its length")
    shapes = list(_SECTION.iter_unpack(head[_HEADER.size :]))
    if not num_sections:
        return Frame(op=op, text=body.tobytes(), **numbers)
    return Frame(op=op, sections=_sections(shapes, body), body=body, **numbers)


def _body_bytes(shape: tuple[int, ...]) -> int:
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


def _fitting(into: Sequence[NDArray[np.float32]], shapes: Sequence[tuple[int, ...]]) -> Sequence[NDArray[np.float32]]:
    found = [(num_rows, dim) for _, dim, num_keys, num_rows in shapes if not num_keys]
    if found != [target.shape for target in into]:
        raise WireError("the answer's rows do not have the shape that was asked for")
    return into


def _parse_header(head: bytes | bytearray) -> tuple[Op, int, int, dict[str, Any]]:
    magic, version, op, num_sections, body_bytes, *numbers = _HEADER.unpack(head)
    if magic != MAGIC:
        raise WireError("what came is not a frame of weft")
    if version != VERSION:
        raise WireError(f"the peer speaks version {version} of the protocol, this is version {VERSION}")
    if body_bytes > MAX_BODY_BYTES or num_sections > MAX_SECTIONS or op not in Op._value2member_map_:
        raise WireError(f"a frame of {body_bytes} bytes, {num_sections} sections, operation {op} is refused")
    names = ("unit", "client", "sequence", "version", "weight", "lr_scale")
    return Op(op), num_sections, body_bytes, dict(zip(names, numbers, strict=True))
