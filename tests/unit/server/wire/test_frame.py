"""Frames come out as they went in; what is not a frame is refused before memory is taken."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import WireError
from weft.server.wire.frame import Frame, FrameReader, Op, TableSection, control, logged_frame, send_frame


def through_a_socket(frame: Frame, reader: FrameReader | None = None) -> Frame:
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, frame)
        return (reader or FrameReader()).read(right)


@settings(max_examples=50)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(0, 20)), max_size=4),
    unit=st.integers(-1, 2**62),
    client=st.integers(0, 2**64 - 1),
)
def test_a_frame_survives_the_wire_and_the_log(shapes: list[tuple[int, int, int]], unit: int, client: int) -> None:
    sections = [
        TableSection(
            table=table,
            keys=np.arange(count, dtype=np.int64) - 3,
            values=np.full((count, dim), number, np.float32) if dim else None,
        )
        for number, (table, dim, count) in enumerate(shapes)
    ]
    frame = Frame(op=Op.PUSH, sections=sections, unit=unit, client=client, sequence=7, version=9, weight=2.5)
    received = through_a_socket(frame)
    again = logged_frame(bytes(received.head()), received.body)
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
        send_frame(left, Frame(op=Op.OK, sections=[TableSection(table=0, values=rows)]))
        target = np.empty((4, 3), np.float32)
        FrameReader().read(right, into=[target])
        assert np.array_equal(target, rows)
        send_frame(left, Frame(op=Op.OK, sections=[TableSection(table=0, values=rows)]))
        with pytest.raises(WireError, match="shape"):
            FrameReader().read(right, into=[np.empty((4, 2), np.float32)])


def answer(rows: np.ndarray) -> Frame:
    return Frame(op=Op.OK, sections=[TableSection(table=0, values=rows)])


def test_frames_that_came_together_are_read_one_by_one() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    keys = np.arange(3, dtype=np.int64)
    left, right = socket.socketpair()
    with left, right:
        reader = FrameReader()
        for _ in range(3):
            send_frame(left, Frame(op=Op.WAITING, text=b"{}"))  # shorter than the sections of what is waited for
            send_frame(left, answer(rows))
            send_frame(left, Frame(op=Op.PULL, sections=[TableSection(table=7, keys=keys)]))
            send_frame(left, control(Op.CONTROL, {"verb": "stats"}))
            target = np.zeros((4, 3), np.float32)
            assert reader.read(right, into=[target]).json() == {}
            assert reader.read(right, into=[target]).op == Op.OK
            assert np.array_equal(target, rows)
            section = reader.read(right).sections[0]
            assert (section.table, section.keys.tolist()) == (7, [0, 1, 2])
            assert section.keys.flags.aligned
            assert reader.read(right).json() == {"verb": "stats"}


def test_a_frame_that_comes_byte_by_byte_and_outgrows_the_memory_is_whole() -> None:
    values = np.arange(60_000, dtype=np.float32).reshape(-1, 3)
    frame = Frame(op=Op.PUSH, sections=[TableSection(table=1, keys=np.arange(20_000, dtype=np.int64), values=values)])
    raw = b"".join(bytes(memoryview(part).cast("B")) for part in frame.parts() if len(part))
    left, right = socket.socketpair()

    def dribble() -> None:
        for at in range(100):
            left.sendall(raw[at : at + 1])
        left.sendall(raw[100:] + raw)

    with left, right:
        sender = threading.Thread(target=dribble)
        sender.start()
        reader = FrameReader()
        for _ in range(2):
            section = reader.read(right).sections[0]
            assert np.array_equal(section.keys, np.arange(20_000))
            assert section.values is not None
            assert np.array_equal(section.values, values)
        sender.join()


def test_an_answer_without_the_rows_that_were_asked_for_is_refused() -> None:
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, Frame(op=Op.OK))
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
