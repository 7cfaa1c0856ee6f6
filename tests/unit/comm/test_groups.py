"""Groups beyond the default one: they wait for a silent rank as long as that one does, and have a name."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from weft.comm import flight
from weft.comm.flight import begin_world, group_traces, is_pending, progress_mark, usual
from weft.comm.groups import OwnedGroups, ensure_group


@pytest.fixture
def world() -> Iterator[None]:
    assert ensure_group(device_type="cpu", timeout_s=7.0)
    try:
        yield
    finally:
        dist.destroy_process_group()


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    assert group is not None
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


@pytest.mark.usefixtures("world")
def test_the_collective_timeout_is_that_of_every_group() -> None:
    owner = OwnedGroups()
    assert timeout_of(owner.new([0], title="data parallel")) == timedelta(seconds=7)
    assert timeout_of(owner.new([0], title="checkpoint", timeout=timedelta(minutes=30))) == timedelta(minutes=30)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    owner.adopt(mesh.get_all_groups())
    for group in mesh.get_all_groups():
        assert timeout_of(group) == timedelta(seconds=7)
    owner.close()


@pytest.mark.usefixtures("world")
def test_torchs_recorder_counts_the_collectives_of_every_group() -> None:
    before = progress_mark()
    group = OwnedGroups().new([0], title="data parallel")
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2))
    assert progress_mark() != before
    named = {trace.title: trace for trace in group_traces().values()}
    assert (named["data parallel"].number, named["data parallel"].ranks) == (3, (0,))
    assert (named["data parallel"].last[-1].name, named["all ranks"].number) == ("all_reduce", 1)


@pytest.mark.usefixtures("world")
def test_a_collective_that_is_complete_is_not_pending() -> None:
    dist.all_reduce(torch.ones(2))
    give_up = time.monotonic() + 30.0
    while is_pending():  # a thread of Gloo records the end, a moment after the caller has its result
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_a_collective_of_an_earlier_world_is_not_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder keeps the state of groups that were destroyed: one that failed there would be pending for ever."""
    states = {"0": {"last_completed_collective": "1", "last_enqueued_collective": "2"}}
    monkeypatch.setattr(flight, "_recorders", lambda: [lambda *_: json.dumps({"pg_status": states})])
    monkeypatch.setattr(flight, "_ended", set())
    assert is_pending()
    begin_world()
    assert not is_pending()
    states["1"] = {"last_completed_collective": "-1", "last_enqueued_collective": "1"}
    assert is_pending()


def test_a_skipped_collective_is_not_what_usually_follows() -> None:
    step = ["weight", "gather 0", "gather 1", "scatter 1", "scatter 0", "norm", "loss"]
    assert usual([*step, *step])[:3] == [None] * 3
    assert False not in usual([*step, *step, *step])
    assert usual([*step, *step, *step])[-len(step) :] == [True] * len(step)
    skipped = [*step, *step, *(one for one in step if one != "scatter 1")]
    assert usual(skipped).count(False) == 1
    assert skipped[usual(skipped).index(False)] == "scatter 0"
