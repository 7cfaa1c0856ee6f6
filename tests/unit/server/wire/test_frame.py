"""Frames come out as they went in; what is not a frame is refused before memory is taken."""

from __future__ import annotations

import socket
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import WireError
from weft.server.wire.frame import Frame, FrameReader, Op, Section, frame_of, send_frame


def through_a_socket(frame: Frame, reader: FrameReader | None = None) -> Frame:
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, frame)
        return (reader or FrameReader()).read(right)


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(0, 20)), max_size=4),
    unit=st.integers(-1, 2**62),
    client=st.integers(0, 2**64 - 1),
)
def test_a_frame_survives_the_wire_and_the_log(shapes: list[tuple[int, int, int]], unit: int, client: int) -> None:
    sections = [
        Section(
            table=table,
            keys=np.arange(count, dtype=np.int64) - 3,
            values=np.full((count, dim), number, np.float32) if dim else None,
        )
        for number, (table, dim, count) in enumerate(shapes)
    ]
    frame = Frame(op=Op.PUSH, sections=sections, unit=unit, client=client, sequence=7, version=9, weight=2.5)
    received = through_a_socket(frame)
    again = frame_of(bytes(received.head()), received.body)
    for found in (received, again):
        assert (found.op, found.unit, found.client, found.sequence) == (Op.PUSH, unit, client, 7)
        assert (found.version, found.weight) == (9, 2.5)
        assert [section.shape for section in found.sections] == [section.shape for section in sections]
        for given_section, section in zip(sections, found.sections, strict=True):
            assert np.array_equal(section.keys, given_section.keys)
            if given_section.values is not None and section.values is not None:
                assert np.array_equal(section.values, given_section.values)


def test_rows_of_an_answer_go_where_they_are_wanted() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, Frame(op=Op.OK, sections=[Section(table=0, values=rows)]))
        target = np.empty((4, 3), np.float32)
        FrameReader().read(right, into=[target])
        assert np.array_equal(target, rows)
        send_frame(left, Frame(op=Op.OK, sections=[Section(table=0, values=rows)]))
        with pytest.raises(WireError, match="shape"):
            FrameReader().read(right, into=[np.empty((4, 2), np.float32)])


def header(**changed: object) -> bytes:
    fields: dict[str, object] = {"magic": b"WEFT", "version": 1, "op": 1, "sections": 0, "body": 0, **changed}
    return struct.pack("<4sBBHQqQQQff", *fields.values(), -1, 0, 0, 0, 1.0, 1.0)


@pytest.mark.parametrize(
    "raw",
    [
        header(magic=b"HTTP"),
        header(version=9),
        header(op=63),
        header(body=2**50),
        header(sections=60_000),
        header(sections=1, body=8) + struct.pack("<IIII", 0, 4, 3, 3),
    ],
    ids=["magic", "version", "operation", "length", "sections", "sum"],
)
def test_what_is_not_a_frame_is_refused(raw: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(raw)
        with pytest.raises(WireError):
            FrameReader().read(right)
