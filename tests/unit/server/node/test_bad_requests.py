"""What an authenticated peer may send wrongly, and what it costs: one answer. The server and its log go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.core.errors import RunError, TableError, WeftError
from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server.client import Client
from weft.server.node.server import Server
from weft.server.node.state import NodeSpec, State
from weft.server.table.table import Table
from weft.server.wire.frame import UNITS, Frame, FrameReader, Op, TableSection, control, send_frame
from weft.server.wire.handshake import connect_known

TOKEN = "only for tests"
KEYS = np.arange(4, dtype=np.int64)
ONES = np.ones((4, 3), np.float32)
SPEC = TableSpec(
    name="t", dim=3, optimizer=RowOptimizer(kind="sgd", learning_rate=1.0), init=RowInit(kind="zeros")
)  # a push of ones takes one from each column


class Served:
    """One server and a client; `restart` is what a crash and a new process would be."""

    def __init__(self, folder: Path | None, **spec: Any) -> None:
        self._folder, self._spec = folder, NodeSpec(**spec)
        self.server = Server(index=0, spec=self._spec, folder=folder, token=TOKEN)
        self.endpoint = self.server.start()
        self.client = Client(lambda _: self.endpoint, num_servers=1, token=TOKEN, client_id=1)
        self.client.create(SPEC)

    def restart(self) -> None:
        self.server.stop()
        self.server = Server(index=0, spec=self._spec, folder=self._folder, token=TOKEN)
        self.endpoint = self.server.start()

    def ask(self, frame: Frame) -> Frame:
        with connect_known(self.endpoint, TOKEN, peer="the server") as connection:
            connection.settimeout(60)
            send_frame(connection, frame)
            return FrameReader().read(connection)

    def rows(self) -> Any:
        return self.client.pull({"t": KEYS}).rows["t"]

    def stop(self) -> None:
        self.client.close()
        self.server.stop()


@pytest.fixture
def served(tmp_path: Path) -> Any:
    started: list[Served] = []

    def start(folder: Path | None = tmp_path, **spec: Any) -> Served:
        started.append(Served(folder, **spec))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def _section(**fields: Any) -> TableSection:
    return TableSection(**{"table": 0, "keys": KEYS, "values": ONES, **fields})


MALFORMED = {
    "create without a spec": control(Op.CONTROL, {"verb": "create"}),
    "a spec that is no table": control(Op.CONTROL, {"verb": "create", "spec": 3}),
    "a table that cannot be made": control(Op.CONTROL, {"verb": "create", "spec": {"name": "u", "dim": 2**62}}),
    "an unknown verb": control(Op.CONTROL, {"verb": "dance"}),
    "hot without a number": control(Op.CONTROL, {"verb": "hot", "table": "t"}),
    "text that is not JSON": Frame(op=Op.CONTROL, text=b"{"),
    "JSON without an end": Frame(op=Op.CONTROL, text=b"[" * 100_000),
    "a range without a table": Frame(op=Op.ROWS),
    "a range without ends": Frame(op=Op.ROWS, sections=[_section(values=None)]),
    "a push with text": Frame(op=Op.PUSH, text=b"text"),
    "a push without values": Frame(op=Op.PUSH, sections=[_section(values=None)]),
    "a push to no table": Frame(op=Op.PUSH, sections=[_section(table=9)]),
    "a push that lists units": Frame(op=Op.PUSH, sections=[_section(), _section(table=UNITS, values=None)]),
    "a share that lists units": Frame(op=Op.PUSH, sections=[_section(table=UNITS)], unit=0),
    "an assignment with a unit": Frame(op=Op.ASSIGN, sections=[_section()], unit=0),
    "a deletion that lists units": Frame(op=Op.DELETE, sections=[_section(table=UNITS, values=None)]),
    "a pull from the units": Frame(op=Op.PULL, sections=[_section(table=UNITS, values=None)]),
    "an answer": Frame(op=Op.OK),
}


@pytest.mark.parametrize("gate", [0, None])
def test_malformed_requests_are_answered_and_cost_nobody_else_anything(served: Any, gate: int | None) -> None:
    node = served(gate=gate)
    before = node.client.stats()[0]["log_number"]
    for name, frame in MALFORMED.items():
        assert node.ask(frame).op == Op.ERROR, name
        assert node.client.stats()[0]["log_number"] == before, f"{name}: in the log"
    node.client.push({"t": (KEYS, ONES)}, unit=0)
    node.client.snapshot()
    assert np.all(node.rows() == -1)
    node.restart()
    assert np.all(node.rows() == -1), "and the log can be replayed"


def test_a_table_that_this_server_cannot_make_is_refused_and_others_are_made(served: Any) -> None:
    node = served(None)
    with pytest.raises(TableError, match="mapped needs a folder"):
        node.client.create(TableSpec(name="m", dim=3, tier="mapped"))
    node.client.create(TableSpec(name="u", dim=2))
    node.client.push({"t": (KEYS, ONES)})
    assert np.all(node.rows() == -1)


@pytest.mark.parametrize("kind", [ZeroDivisionError, TableError])
@pytest.mark.parametrize("verb", ["create", "shrink", "push"])
def test_what_is_logged_and_not_applied_ends_every_change(
    served: Any, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], verb: str
) -> None:
    node = served()
    node.client.push({"t": (KEYS, ONES)})
    ask = {
        "create": lambda: node.client.create(TableSpec(name="u", dim=2)),
        "shrink": lambda: node.server._shrink(0),
        "push": lambda: node.client.push({"t": (KEYS, ONES)}),
    }[verb]

    def fail(*_: Any, **__: Any) -> None:
        raise kind("by design")

    with monkeypatch.context() as patch:
        patch.setattr(State, "apply", fail)
        patch.setattr(Table, "victims", lambda *_, **__: KEYS)
        with pytest.raises(RunError, match=f"server 0 failed: {kind.__name__}"):
            ask()
    for later in (lambda: node.client.push({"t": (KEYS, ONES)}), node.rows, node.client.snapshot):
        with pytest.raises(RunError, match="by design"):
            later()
    node.restart()
    expected = {"create": -1, "shrink": 0, "push": -2}[verb]
    assert np.all(node.rows() == expected), "what was logged counts"


def test_a_step_whose_update_fails_when_it_is_read_is_a_defect_too(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = served(gate=0)
    node.client.push({"t": (KEYS, ONES)}, unit=0)
    with monkeypatch.context() as patch:
        patch.setattr(Table, "push", lambda *_, **__: 1 / 0)
        with pytest.raises(RunError, match="ZeroDivisionError"):
            node.rows()
    with pytest.raises(RunError, match="ZeroDivisionError"):
        node.client.snapshot()  # would retire the log, which alone has the step
    node.restart()
    assert np.all(node.rows() == -1)


def _capped(node: Served, rows: int) -> None:
    node.server.hold(Table(SPEC, reserve_rows=rows))


def test_shares_of_a_step_find_room_together(served: Any) -> None:
    node = served(gate=0, shares=3)
    _capped(node, 10)
    node.client.push({"t": (KEYS, ONES)}, unit=0)
    node.client.push({"t": (KEYS + 4, ONES)}, unit=1)
    with pytest.raises(TableError, match="room for 10, 12 new keys"):
        node.client.push({"t": (KEYS + 8, ONES)}, unit=2)
    with pytest.raises(TableError, match="the table is full"):  # what shares were promised is nobody else's
        node.client.assign("t", KEYS + 8, ONES)
    node.client.push({"t": (KEYS[:2] + 8, ONES[:2])}, unit=2)
    with pytest.raises(TableError, match="room for 10, 11 new keys"):  # the step is complete, its rows are not made
        node.client.push({"t": (KEYS[:1] + 20, ONES[:1])}, unit=3)
    assert node.client.stats()[0]["tables"][0]["rows"] == 0
    assert np.allclose(node.rows(), -1 / 3)
    assert node.client.stats()[0]["tables"][0]["rows"] == 10


def test_sections_of_one_table_find_room_together(served: Any) -> None:
    node = served()
    _capped(node, 6)
    twice = Frame(op=Op.PUSH, sections=[_section(), _section(keys=KEYS + 4)])
    assert node.ask(twice).op == Op.ERROR
    assert node.client.stats()[0]["tables"][0]["rows"] == 0


def test_what_was_applied_is_acknowledged_again_by_a_full_table(served: Any) -> None:
    node = served()
    _capped(node, 4)
    node.client.push({"t": (KEYS, ONES)}, unit=0)
    node.client.delete("t", KEYS)
    node.client.push({"t": (KEYS + 4, ONES)}, unit=1)
    node.client.push({"t": (KEYS, ONES)}, unit=0)
    assert np.all(node.rows() == 0)
    with pytest.raises(WeftError, match="the table is full"):
        node.client.push({"t": (KEYS, ONES)}, unit=2)
