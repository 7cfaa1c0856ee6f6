"""Groups beyond the default one: they wait for a silent rank as long as that one does, and have a name."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from weft.comm.flight import group_traces, progress_mark
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
