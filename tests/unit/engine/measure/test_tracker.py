"""Bytes count from the operator that makes them until they are dropped, on one device; the peak is the most."""

from __future__ import annotations

import torch

from weft.comm.watch import OperatorWatch
from weft.engine.measure.flops import FlopCounter
from weft.engine.measure.tracker import BEFORE, MemoryTracker, Moment, rounded

MIB = 2**20


def test_the_peak_is_the_most_that_was_alive_at_once() -> None:
    tracker = MemoryTracker(device_type="cpu")
    before = torch.zeros(MIB, dtype=torch.uint8)
    tracker.start([before])
    with tracker.following(), OperatorWatch(tracker):
        first = torch.zeros(2 * MIB, dtype=torch.uint8)
        second = first + 1
        del first
        third = second * 2
        del second
        kept = third[:10]  # a view holds the whole storage
        del third
        alive = tracker.current_bytes
        del kept
        after = tracker.current_bytes
    assert tracker.peak.nbytes == 5 * MIB
    assert alive == 3 * MIB
    assert after == MIB
    assert tracker.live[before.untyped_storage()._cdata].phase == BEFORE


def test_a_resized_storage_counts_with_its_new_size() -> None:
    tracker = MemoryTracker(device_type="cpu")
    with tracker.following(), OperatorWatch(tracker):
        tensor = torch.zeros(MIB, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        empty = tracker.current_bytes
        tensor.untyped_storage().resize_(3 * MIB)
        again = tracker.current_bytes
    assert (empty, again) == (0, 3 * MIB)


def test_other_devices_are_not_counted() -> None:
    tracker = MemoryTracker(device_type="cuda")
    with tracker.following(), OperatorWatch(tracker):
        torch.zeros(MIB)
    assert tracker.peak.nbytes == 0


def test_what_a_kernel_takes_for_itself_counts_while_it_runs() -> None:
    told: list[tuple[int, int]] = []
    tracker = MemoryTracker(
        device_type="cpu",
        workspace=lambda func, args: MIB if func is torch.ops.aten.mm.default else 0,
        allocated=lambda key, nbytes: told.append((key, nbytes)),
    )
    square = torch.ones(4, 4)
    with tracker.following(), OperatorWatch(tracker):
        product = square @ square
    assert tracker.peak.nbytes == rounded(product.nbytes) + MIB
    assert tracker.peak.workspace_bytes == MIB
    assert tracker.current_bytes == rounded(product.nbytes)
    assert told[1:] == [(-1, MIB), (-1, 0)]


def test_a_moment_is_found_again_in_the_next_step() -> None:
    seen: list[int] = []
    tracker = MemoryTracker(device_type="cpu", look=lambda live: seen.append(len(live)))
    weight = torch.ones(8, 8, requires_grad=True)

    def step() -> None:
        ((weight @ weight) @ weight).sum().backward()
        weight.grad = None

    tracker.start([weight])
    with tracker.following(), OperatorWatch(tracker):
        step()
        moment = tracker.peak.moment
        tracker.reset(look_at=moment)
        step()
    assert moment == tracker.peak.moment
    assert moment.phase == "backward"
    assert len(seen) == 1
    assert moment != Moment()


def test_operations_are_those_of_the_formula() -> None:
    counter = FlopCounter()
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    with OperatorWatch(counter):
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert counter.total == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    with OperatorWatch(counter):
        out.sum().backward()
    assert counter.total == (2 + 5) * (2 * 2 * 4 * 16 * 16 * 8)
    counter.total = 0
    with OperatorWatch(counter):
        torch.ones(3, 5) @ torch.ones(5, 7)
    assert counter.total == 2 * 3 * 5 * 7
