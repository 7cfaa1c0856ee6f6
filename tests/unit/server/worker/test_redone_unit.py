"""A unit that is done again reads what was read the first time, although its step is complete by now."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server.client import Client
from weft.server.node.server import Server
from weft.server.node.state import NodeSpec

SPEC = TableSpec(name="t", dim=1, optimizer=RowOptimizer(kind="sgd", learning_rate=1.0), init=RowInit(kind="zeros"))
KEY = np.array([9], dtype=np.int64)


def test_a_complete_step_is_seen_by_readers_of_the_next_one_and_not_by_its_own(tmp_path: Path) -> None:
    server = Server(index=0, spec=NodeSpec(shares=2, gate=0), folder=tmp_path, token="t")
    endpoint = server.start()
    client = Client(lambda index: endpoint, num_servers=1, token="t", client_id=1)

    def value(unit: int | None) -> float:
        return float(client.pull({"t": KEY}, unit=unit).rows["t"][0, 0])

    try:
        client.create(SPEC)
        for unit in (0, 1):
            client.push({"t": (KEY, np.ones((1, 1), np.float32))}, unit=unit)
        assert [value(0), value(1)] == [0.0, 0.0]
        client.push({"t": (KEY, np.full((1, 1), 5.0, np.float32))}, unit=1)  # done again: counts once
        assert [value(2), value(1), value(None)] == [-1.0, -1.0, -1.0]
    finally:
        client.close()
        server.stop()


def test_a_restart_makes_no_update_that_was_not_due_before(tmp_path: Path) -> None:
    """A worker dies with its share on one of two servers, and that server too: the redone share must not differ."""
    for start in range(2):
        server = Server(index=0, spec=NodeSpec(shares=2, gate=0), folder=tmp_path, token="t")
        endpoint = server.start()
        client = Client(lambda index, endpoint=endpoint: endpoint, num_servers=1, token="t", client_id=1 + start)
        client.create(SPEC)
        for unit in (0, 1):
            client.push({"t": (KEY, np.ones((1, 1), np.float32))}, unit=unit)
        read = [float(client.pull({"t": KEY}, unit=unit).rows["t"][0, 0]) for unit in (1, 2)[: start + 1]]
        assert read == [0.0, -1.0][: start + 1]
        client.close()
        server.stop()
