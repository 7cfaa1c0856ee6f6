"""A server through its socket: gates, sums, staleness, retries, restarts. Rows against a few lines of numpy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_for

from weft.core.errors import CheckpointError, LogError, RunError, ServerLostError, TableError, TokenError, WorkerError
from weft.core.table_spec import Eviction, RowInit, RowOptimizer, TableSpec
from weft.server.client import Client
from weft.server.durable import log as log_module
from weft.server.node.reshard import reshard
from weft.server.node.server import Server
from weft.server.node.state import NodeSpec
from weft.server.wire.sockets import Endpoint

TOKEN = "only for tests"
KEYS = np.array([5, -1, 2**62, 7], np.int64)


def table(name: str = "t", kind: str = "sgd", **fields: Any) -> TableSpec:
    optimizer = RowOptimizer(kind=kind, learning_rate=1.0)  # type: ignore[arg-type]
    return TableSpec(name=name, dim=3, optimizer=optimizer, init=RowInit(kind="zeros"), **fields)


def ones(count: int, value: float = 1.0) -> Any:
    return np.full((count, 3), value, np.float32)


class Cluster:
    """Servers in this process, that can be stopped as if killed and started again."""

    def __init__(self, folder: Path | None, spec: NodeSpec) -> None:
        self.folder, self.spec = folder, spec
        self.servers: list[Server] = []
        self.endpoints: dict[int, Endpoint] = {}
        self.clients: list[Client] = []
        for index in range(spec.num_servers):
            self.start(index)

    def start(self, index: int) -> None:
        folder = None if self.folder is None else self.folder / str(index)
        server = Server(index=index, spec=self.spec, folder=folder, token=TOKEN)
        self.servers = [*self.servers[:index], server, *self.servers[index + 1 :]]
        self.endpoints[index] = server.start()

    def restart(self) -> None:
        for index, server in enumerate(self.servers):
            server.stop()
            self.start(index)

    def client(self, **fields: Any) -> Client:
        given = {"num_servers": self.spec.num_servers, "token": TOKEN, "client_id": len(self.clients) + 1, **fields}
        self.clients.append(Client(self.endpoints.__getitem__, **given))
        return self.clients[-1]

    def stop(self) -> None:
        for end in (*self.clients, *self.servers):
            end.close() if isinstance(end, Client) else end.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    with contextlib.ExitStack() as stack:

        def start(folder: Path | None = tmp_path, **fields: Any) -> Cluster:
            found = Cluster(folder, NodeSpec(**fields))
            stack.callback(found.stop)
            return found

        yield start


def read(client: Client, keys: Any = KEYS, name: str = "t") -> Any:
    return client.pull({name: keys}).rows[name]


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_rows_are_pushed_and_pulled_in_the_order_of_keys(cluster: Any, num_servers: int) -> None:
    client = cluster(num_servers=num_servers).client()
    client.create(table())
    keys = np.random.default_rng(0).permutation(1000).astype(np.int64)
    gradients = np.repeat(keys.astype(np.float32)[:, None], 3, axis=1)
    client.push({"t": (keys, gradients)})
    assert np.array_equal(read(client, keys[::-1].copy()), -gradients[::-1])
    assert sum(server["tables"][0]["rows"] for server in client.stats()) == 1000
    found = dict(zip(*(np.concatenate(part).tolist() for part in zip(*client.rows("t"), strict=True)), strict=True))
    assert {key: row[0] for key, row in found.items()} == {key: -float(key) for key in keys.tolist()}


def test_a_server_without_any_of_the_keys_answers_too(cluster: Any) -> None:
    client = cluster(num_servers=3).client()
    client.create(table())
    client.push({"t": (KEYS[:1], ones(1))}, unit=0)
    assert np.all(read(client, KEYS[:1]) == -1)
    assert np.all(client.exchange({"t": (KEYS[:1], ones(1))})["t"] == 0)
    assert [server["units"] for server in client.stats()] == [1, 1, 1]


def test_equal_keys_of_a_push_are_summed(cluster: Any) -> None:
    client = cluster().client()
    client.create(table(kind="adagrad"))
    client.push({"t": (np.array([1, 2, 1]), ones(3))})
    assert np.allclose(read(client, np.array([1, 2])), -1.0)  # one Adagrad step each, whatever the size


def test_a_push_is_applied_once_by_sequence_and_by_unit(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = cluster(num_servers=2).client()
    client.create(table())
    client.push({"t": (KEYS, ones(4))})
    monkeypatch.setattr(client, "_sequence", client._sequence - 1)  # as after a lost acknowledgement
    client.push({"t": (KEYS, ones(4))})
    assert np.all(read(client) == -1)
    for _ in range(2):
        client.push({"t": (KEYS, ones(4))}, unit=0)
    assert np.all(read(client) == -2)
    assert [server["repeated"] for server in client.stats()] == [2, 2]


def test_on_disk_a_repeated_push_waits_for_the_sync_of_the_first(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = cluster(durability="disk")
    client, other = started.client(), started.client()
    for each in (client, other):
        each.create(table())
    may_sync, synced, plain = threading.Event(), [], log_module.os.fdatasync

    def slow(file: int) -> None:
        assert may_sync.wait(10)
        plain(file)
        synced.append(file)

    monkeypatch.setattr(log_module.os, "fdatasync", slow)
    acknowledged: list[int] = []

    def push(by: Client) -> None:
        by.push({"t": (KEYS, ones(4))}, unit=0)
        acknowledged.append(len(synced))

    pushes = []
    for each in (client, other):  # the second is what a worker sends whose acknowledgement was lost
        pushes.append(threading.Thread(target=push, args=(each,), daemon=True))
        pushes[-1].start()
        wait_for(lambda: _counted(started) == len(pushes))
    pushes[1].join(0.2)
    assert acknowledged == []
    may_sync.set()
    for each in pushes:
        each.join(10)
    assert len(acknowledged) == 2
    assert min(acknowledged) > 0


def _counted(started: Cluster) -> int:
    figures = started.servers[0].figures
    return figures.pushes + figures.repeated


@pytest.mark.parametrize("verb", ["create", "shrink"])
def test_on_disk_tables_and_shrinks_are_synced_before_they_are_told(cluster: Any, verb: str) -> None:
    client = (started := cluster(durability="disk")).client()
    client.create(table(eviction=Eviction(max_rows=1)))
    client.push({"t": (KEYS, ones(4))})
    client.create(table("u")) if verb == "create" else client.shrink("t")
    assert started.servers[0]._log._syncs._done == client.stats()[0]["log_number"]


def test_a_step_is_the_weighted_mean_in_order_of_shares(cluster: Any) -> None:
    started = cluster(shares=3, gate=0, num_servers=2)
    client = started.client()
    client.create(table())
    shares = {0: (1.0, 2.0), 1: (3.0, 6.0), 2: (4.0, 0.0)}  # weight, sum of gradients
    for unit in (2, 0, 2, 1):  # out of order, one twice
        assert np.all(read(client) == 0), "nothing moves before the step is complete"
        weight, total = shares[unit]
        client.push({"t": (KEYS, ones(4, total))}, unit=unit, weight=weight)
    assert np.all(read(client) == -1.0)
    assert [server["units"] for server in client.stats()] == [3, 3]


def test_sync_has_the_same_bits_in_any_order_of_arrival(cluster: Any, tmp_path: Path) -> None:
    found = []
    generator = np.random.default_rng(1)
    pushes = [(generator.permutation(50)[:30], generator.normal(size=(30, 3)).astype(np.float32)) for _ in range(8)]
    for run, order in enumerate(([0, 1, 2, 3], [3, 1, 0, 2])):
        client = cluster(tmp_path / str(run), shares=4, gate=0, num_servers=1 + run).client()
        client.create(table(kind="adam"))
        for step in range(2):
            for share in order:
                client.push({"t": pushes[step * 4 + share]}, unit=step * 4 + share, weight=7.0)
        found.append(read(client, np.arange(50)))
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize(("gate", "ahead"), [(0, 0), (1, 1), (3, 3)])
def test_a_pull_waits_for_steps_that_lie_further_back_than_the_gate(cluster: Any, gate: int, ahead: int) -> None:
    started = cluster(shares=2, gate=gate)
    client, other = started.client(), started.client()
    client.create(table())
    other.create(table())
    client.pull({"t": KEYS}, unit=2 * ahead + 1)  # at once
    done: list[int] = []
    waiting = threading.Thread(
        target=lambda: done.append(len(other.pull({"t": KEYS}, unit=2 * (ahead + 1)).versions)), daemon=True
    )
    waiting.start()
    client.push({"t": (KEYS, ones(4))}, unit=0)
    waiting.join(0.2)
    assert not done, "step 0 has one of two shares"
    client.push({"t": (KEYS, ones(4))}, unit=1)
    waiting.join(10)
    assert done == [1]


def test_a_waiting_pull_hears_what_it_waits_for(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.node.server.REPORT_EVERY_S", 0.05)
    started = cluster(shares=1, gate=0)
    client, other = started.client(), started.client()
    client.create(table())
    other.create(table())
    later = threading.Timer(0.3, lambda: other.push({"t": (KEYS, ones(4))}, unit=0))
    later.start()
    assert client.pull({"t": KEYS}, unit=1).waited_for == 0
    later.join()


def test_stale_gradients_count_less(cluster: Any) -> None:
    client = cluster(shares=2, discount=1.0).client()
    client.create(table())
    versions = client.pull({"t": KEYS}, unit=0).versions
    found = [client.push({"t": (KEYS, ones(4))}, unit=unit, versions=versions).staleness for unit in range(4)]
    assert found == [(0,), (1,), (2,), (3,)]
    # tau - (shares - 1), over shares, beyond 0: 0, 0, 1/2, 1
    assert np.allclose(read(client), -(1 + 1 + 1 / 1.5 + 1 / 2))
    assert client.stats()[0]["staleness"] == {"0": 1, "1": 1, "2": 1, "3": 1}


def test_exchange_adds_and_answers_with_what_others_added(cluster: Any) -> None:
    started = cluster(num_servers=2)
    client, other = started.client(), started.client()
    for each in (client, other):
        each.create(table(kind="adam"))
    other.exchange({"t": (KEYS, ones(4, 0.5))})
    assert np.all(client.exchange({"t": (KEYS, ones(4, 0.25))})["t"] == 0.75)


def test_an_exchange_counts_once_by_its_units_whoever_brings_them(cluster: Any) -> None:
    started = cluster(num_servers=2)
    for start in range(2):  # what was applied is known after a restart too
        client = started.client()
        client.create(table())
        assert np.all(client.exchange({"t": (KEYS, ones(4))}, units=[3, 5])["t"] == 1)
        assert np.all(client.exchange({"t": (KEYS, ones(4))}, units=[5])["t"] == 1)
        with pytest.raises(WorkerError, match="done by another worker"):
            client.exchange({"t": (KEYS, ones(4))}, units=[5, 6])
        assert [stats["units_above"] for stats in client.stats()] == [[3, 5]] * 2
        if not start:
            started.restart()
    assert np.all(client.exchange({"t": (KEYS, ones(4))}, units=[6])["t"] == 2)
    client.exchange({}, units=[0, 1, 2, 4])
    assert [stats["units"] for stats in client.stats()] == [7, 7]


def test_one_servers_error_leaves_the_others_answers_in_order(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = cluster(num_servers=2)
    client = started.client()
    client.create(table())
    with monkeypatch.context() as broken:
        broken.setattr(started.servers[0], "_append_and_apply", _full)
        with pytest.raises(LogError):
            client.push({"t": (KEYS, ones(4))}, unit=0)
    assert client.push({"t": (KEYS, ones(4))}, unit=0).staleness == (0, 0)
    keys = np.arange(100, dtype=np.int64)
    assert read(client, keys).shape == (100, 3)
    assert np.all(read(client) == -1)


def _full(frame: Any) -> int:
    raise LogError("full")


def test_assign_sets_absent_rows_only(cluster: Any) -> None:
    client = cluster().client()
    client.create(table())
    client.assign("t", KEYS[:2], ones(2, 5.0))
    client.assign("t", KEYS, ones(4, 9.0))
    assert read(client)[:, 0].tolist() == [5, 5, 9, 9]
    client.assign("t", KEYS, ones(4, 1.0), only_absent=False)
    assert np.all(read(client) == 1)


def workload(client: Client, start: int, steps: int, *, shares: int, rng_seed: int = 3) -> None:
    generator = np.random.default_rng(rng_seed)
    for unit in range((start + steps) * shares):
        keys = generator.permutation(400)[:60].astype(np.int64)
        gradients = generator.normal(size=(60, 3)).astype(np.float32)
        if unit >= start * shares:
            client.push({"t": (keys, gradients)}, unit=unit, weight=2.0)


@pytest.mark.parametrize("gate", [0, None])
@pytest.mark.parametrize("kind", ["adagrad", "adam"])
@pytest.mark.parametrize("snapshot", ["none", "whole", "incremental"])
def test_a_restart_changes_no_bit(cluster: Any, tmp_path: Path, gate: Any, kind: str, snapshot: str) -> None:
    spec = table(kind=kind, admit_after=2)
    whole = cluster(tmp_path / "whole", shares=3, gate=gate).client()
    whole.create(spec)
    workload(whole, 0, 6, shares=3)
    broken = cluster(tmp_path / "broken", shares=3, gate=gate)
    client = broken.client()
    client.create(spec)
    for step in range(6):
        workload(client, step, 1, shares=3)
        if snapshot != "none":
            client.snapshot(incremental=snapshot == "incremental")
        if step == 3:  # half of a step is in when the server goes
            generator = np.random.default_rng(3)
            for _ in range(13):
                keys, gradients = generator.permutation(400)[:60], generator.normal(size=(60, 3))
            client.push({"t": (keys, gradients)}, unit=12, weight=2.0)
            if snapshot == "whole":
                client.snapshot()
        if step in (1, 3):
            broken.restart()
    keys = np.arange(400)
    assert np.array_equal(read(client, keys), read(whole, keys))
    assert [s["units"] for s in client.stats()] == [18]


def test_a_snapshot_beside_pushes_loses_and_doubles_nothing(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.node.snapshots.COPY_BYTES", 1024)
    started = cluster()
    client, other = started.client(), started.client()
    client.create(table(eviction=Eviction(min_count=2)))
    other.create(table(eviction=Eviction(min_count=2)))
    generator, is_over = np.random.default_rng(0), threading.Event()
    expected = np.zeros(5000)

    def keep_snapshotting() -> None:
        while not is_over.is_set():
            other.snapshot(incremental=generator.random() < 0.5)

    thread = threading.Thread(target=keep_snapshotting)
    thread.start()
    for _ in range(60):
        keys = generator.permutation(5000)[:400]
        client.push({"t": (keys, ones(400))})
        expected[keys] -= 1
    gone = expected == -1
    assert client.shrink("t") == gone.sum()
    expected[gone] = 0
    is_over.set()
    thread.join()
    for _ in range(2):
        started.restart()
        assert np.array_equal(read(client, np.arange(5000))[:, 0], expected)


def test_shrink_is_replayed_by_key(cluster: Any) -> None:
    started = cluster()
    client = started.client()
    client.create(table(eviction=Eviction(max_rows=2)))
    for count in range(1, 5):
        client.push({"t": (KEYS[:count], ones(count))})
    assert client.shrink("t") == 2
    client.push({"t": (KEYS[3:], ones(1))})
    before = read(client)
    started.restart()
    assert np.array_equal(read(client), before)
    assert before[:, 0].tolist() == [-4, -3, 0, -1]
    assert client.hot("t", 1) == [(5, 4)]


def test_a_lost_server_is_waited_for_and_then_told(cluster: Any, tmp_path: Path) -> None:
    started = cluster(num_servers=2)
    client = started.client(timeout_s=20)
    client.create(table())
    started.servers[1].stop()
    threading.Timer(0.3, lambda: started.start(1)).start()
    client.push({"t": (KEYS, ones(4))})
    assert np.all(read(client) == -1)
    started.servers[0].stop()
    del started.endpoints[0]
    hasty = started.client(timeout_s=0.3)
    with pytest.raises(ServerLostError, match="server 0 did not come back"):
        hasty.create(table())


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"", b"WEFT" + b"\x01" * 100])
def test_garbage_and_wrong_tokens_leave_the_server_up(cluster: Any, garbage: bytes) -> None:
    started = cluster()
    client = started.client()
    client.create(table())
    with socket.create_connection((started.endpoints[0].host, started.endpoints[0].port)) as stranger:
        stranger.sendall(garbage)
    with pytest.raises(TokenError):
        started.client(token="another").create(table())
    client.push({"t": (KEYS, ones(4))})
    assert np.all(read(client) == -1)


def test_what_does_not_fit_is_refused_and_never_logged(cluster: Any) -> None:
    started = cluster()
    client, other = started.client(), started.client()
    client.create(table())
    other.create(table())
    number = client.stats()[0]["log_number"]
    with pytest.raises(TableError, match="another dim"):
        started.client().create(TableSpec(name="t", dim=5))
    with pytest.raises(TableError, match="3 columns"):
        client.push({"t": (KEYS, np.zeros((4, 2), np.float32))})
    other._tables["t"] = other._tables["t"]._replace(dim=2)  # a client with a wrong description
    with pytest.raises(TableError, match="3 columns"):
        other.push({"t": (KEYS, np.zeros((4, 2), np.float32))})
    other._tables["t"] = other._tables["t"]._replace(dim=3)
    with pytest.raises(TableError, match="was not created"):
        client.pull({"u": KEYS})
    assert client.stats()[0]["log_number"] == number


def test_a_defect_is_told_at_once_and_nothing_follows_it(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = cluster()
    client = started.client()
    client.create(table())
    with monkeypatch.context() as patch:
        patch.setattr("weft.server.node.state.State.apply", lambda *given, **named: 1 / 0)
        with pytest.raises(RunError, match="server 0 failed: ZeroDivisionError"):
            client.push({"t": (KEYS, ones(4))})
    with pytest.raises(RunError, match="ZeroDivisionError"):
        client.push({"t": (KEYS, ones(4))})
    started.restart()
    assert np.all(read(client) == -1), "what was logged counts"


def test_a_full_disk_is_told_and_the_server_goes_on(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = cluster()
    client = started.client()
    client.create(table())

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log_module.os, "pwritev", full)
        with pytest.raises(LogError, match="No space left"):
            client.push({"t": (KEYS, ones(4))})
        assert np.all(read(client) == 0), "what was not logged was not applied"
    client.push({"t": (KEYS, ones(4))})
    started.restart()
    assert np.all(read(client) == -1)


def test_a_damaged_snapshot_is_one_sentence(cluster: Any, tmp_path: Path) -> None:
    started = cluster()
    client = started.client()
    client.create(table())
    client.push({"t": (KEYS, ones(4))})
    client.snapshot()
    started.servers[0].stop()
    path = next((tmp_path / "0" / "snapshots").glob("*/table-0.rows"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="damaged"):
        started.start(0)


def test_another_number_of_shares_goes_on_between_steps_only(cluster: Any, tmp_path: Path) -> None:
    client = (started := cluster(shares=2, gate=0)).client()
    client.create(table())
    for unit in (0, 1, 2):
        client.push({"t": (KEYS, ones(4))}, unit=unit)
    started.spec = NodeSpec(shares=4, gate=0)
    with pytest.raises(CheckpointError, match="step 2 was interrupted"):
        started.restart()
    started.spec = NodeSpec(shares=2, gate=0)
    started.start(0)
    client.push({"t": (KEYS, ones(4))}, unit=3)
    started.spec = NodeSpec(shares=4, gate=0)
    started.restart()
    assert client.stats()[0]["units"] == 8
    for unit in (8, 9, 10, 11):
        client.push({"t": (KEYS, ones(4))}, unit=unit)
    started.restart()
    assert np.allclose(read(client), -3)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_servers(cluster: Any, tmp_path: Path, before: int, after: int) -> None:
    spec = table(kind="adam", admit_after=2)
    whole = cluster(tmp_path / "whole", shares=2, gate=0).client()
    whole.create(spec)
    workload(whole, 0, 6, shares=2)
    first = cluster(tmp_path / "moved", shares=2, gate=0, num_servers=before)
    client = first.client()
    client.create(spec)
    workload(client, 0, 3, shares=2)
    first.stop()
    reshard(tmp_path / "moved", after)
    second = cluster(tmp_path / "moved", shares=2, gate=0, num_servers=after)
    client = second.client()
    client.create(spec)
    workload(client, 3, 3, shares=2)
    second.restart()
    assert np.array_equal(read(client, np.arange(400)), read(whole, np.arange(400)))
    rows = [server["tables"][0]["rows"] for server in client.stats()]
    assert len(rows) == after
    assert all(rows)


def test_a_share_done_again_after_all_servers_died_reads_what_the_first_one_read(cluster: Any) -> None:
    started = cluster(num_servers=2, shares=2, gate=0)
    client = started.client()
    client.create(table())
    keys = np.arange(64, dtype=np.int64)
    client.push({"t": (keys, ones(64))}, unit=0)
    started.servers[1].stop()
    hasty = started.client(timeout_s=0.2)
    hasty._tables = client._tables
    with pytest.raises(ServerLostError):
        hasty.push({"t": (keys, ones(64))}, unit=1)  # server 0 has the whole step, server 1 half of it
    started.servers[0].stop()
    for index in range(2):
        started.start(index)
    client = started.client()
    client.create(table())
    assert np.all(client.pull({"t": keys}, unit=1).rows["t"] == 0)
    client.push({"t": (keys, ones(64))}, unit=1)
    assert np.all(client.pull({"t": keys}, unit=2).rows["t"] == -1)


def test_resharding_what_is_not_between_units_is_refused_or_goes_back(cluster: Any, tmp_path: Path) -> None:
    started = cluster(num_servers=2, shares=2)
    client = started.client()
    client.create(table())
    client.push({"t": (KEYS, ones(4))}, unit=0)
    started.servers[1].stop()
    hasty = started.client(timeout_s=0.2)
    hasty._tables = client._tables
    with pytest.raises(ServerLostError):
        hasty.push({"t": (KEYS, ones(4))}, unit=1)  # one of the two has it
    started.servers[0].stop()
    with pytest.raises(CheckpointError, match="have not applied the same units"):
        reshard(tmp_path, 1)
    for index in range(2):
        started.start(index)
    client = started.client()
    client.create(table())
    client.push({"t": (KEYS, ones(4))}, unit=1)
    client.snapshot()
    started.servers[1].stop()
    with pytest.raises(ServerLostError):
        hasty.push({"t": (KEYS, ones(4))}, unit=2)
    started.servers[0].stop()
    reshard(tmp_path, 1)
    alone = cluster(shares=2)
    client = alone.client()
    client.create(table())
    assert np.all(read(client) == -2)
    assert client.stats()[0]["units"] == 2


@pytest.mark.parametrize(("gate", "part"), [(None, 1 / 2), (0, 1)])
def test_adams_rate_is_less_for_a_share_and_replay_knows_it(cluster: Any, gate: int | None, part: float) -> None:
    started = cluster(num_servers=2, shares=4, gate=gate)
    client = started.client()
    client.create(table(kind="adam"))
    for unit in range(4):
        client.push({"t": (KEYS, ones(4))}, unit=unit)
    started.restart()
    # Adam's step of an unchanging gradient is its rate; sync makes one of the four.
    assert np.allclose(read(client), -part * (1 if gate == 0 else 4), rtol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad", "ftrl"])
def test_an_average_takes_each_workers_part(cluster: Any, kind: str) -> None:
    started = cluster(num_servers=2, shares=4, merge="average")
    client = started.client()
    client.create(table(kind=kind))
    for _ in range(2):
        client.exchange({"t": (KEYS, ones(4))})
        started.restart()
    assert np.allclose(read(client), 2 / 4)


def test_rows_that_somebody_still_has_are_never_written_over(cluster: Any) -> None:
    client = cluster().client()
    client.create(table())
    keys = np.arange(20_000, dtype=np.int64)
    first = read(client, keys)
    view = first[5:10, 1:]
    client.push({"t": (keys, ones(20_000))}, unique=True)
    second = read(client, keys)
    kept = first.ctypes.data
    assert np.all(first == 0)
    assert np.all(second == -1)
    del first
    third = read(client, keys)
    assert np.all(view == 0), "a view counts too"
    del view
    fourth = read(client, keys)
    assert np.all(third == -1)
    assert fourth.ctypes.data == kept, "memory that nobody has is used again"
