"""The wire on one process: a real group of one, and an observer that names what goes out."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.comm.groups import backend_for, ensure_group, sum_over
from weft.comm.ledger import TrafficLedger
from weft.comm.observer import SMALL_ELEMENTS, CollectiveObserver


def test_one_process_has_a_real_group_made_once() -> None:
    ensure_group(device_type="cpu")
    assert dist.is_initialized()
    assert dist.get_world_size() == 1
    assert not ensure_group(device_type="cpu")
    assert backend_for("cpu") == "gloo"
    assert backend_for("cuda") == "cpu:gloo,cuda:nccl"


def test_a_sum_over_one_rank_sends_nothing() -> None:
    ensure_group(device_type="cpu")
    with CollectiveObserver() as seen:
        values = torch.ones(100)
        assert sum_over(values, None) is values
    assert not seen.counts


def test_the_observer_names_collectives_and_their_dtypes() -> None:
    ensure_group(device_type="cpu")
    # torch 2.13 renamed it
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    large, small = torch.ones(SMALL_ELEMENTS + 1, dtype=torch.bfloat16), torch.ones(SMALL_ELEMENTS)
    with CollectiveObserver() as seen:
        dist.all_reduce(large)
        dist.all_reduce(small)
        dist.broadcast(large, src=0)
        dist.all_gather([torch.empty_like(large)], large)
        gather_single(torch.empty_like(large), large)
        torch.ones(3) + 1  # no collective
    assert seen.counts == {"all_reduce": 1, "small_all_reduce": 1, "broadcast": 1, "all_gather": 2}
    assert seen.dtypes["all_reduce"] == {torch.bfloat16}
    assert seen.dtypes["small_all_reduce"] == {torch.float32}
    dist.all_reduce(large)
    assert seen.counts["all_reduce"] == 1  # it watches inside its block only


class _Operator:
    """A c10d operator by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return f"c10d::{self._name}"


def test_a_message_counts_whole_and_where_it_is_sent() -> None:
    ledger = TrafficLedger(axes={}, phase=lambda: "backward")
    for name in ("send", "recv_"):
        ledger.saw(_Operator(name), ([torch.ones(100)],), {}, None)
    row = {"axis": "world", "collective": "send", "phase": "backward", "bytes": 400, "count": 1}
    assert ledger.rows() == [row]
