"""Algorithms as real messages between four Gloo ranks: the bits of the pure interpreter, and their bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from weft.comm.algorithms.costs import count
from weft.comm.algorithms.registry import ALGORITHMS, Algorithm
from weft.comm.algorithms.rounds import CollectiveTask
from weft.comm.algorithms.together import run_together
from weft.comm.bench import BenchSpec, run_bench
from weft.comm.ledger import TrafficLedger
from weft.comm.observer import CollectiveObserver
from weft.comm.sums import GroupSum, Ways
from weft.comm.watch import OperatorWatch
from weft.comm.wire import Wire

NUM_RANKS = 4
SIZES = (0, 3, 103, 4 * 1024)  # elements; a segment below has 256 bytes


def sources(task: CollectiveTask, dtype: torch.dtype, algorithm: Algorithm) -> list[torch.Tensor]:
    found = []
    for rank in range(task.num_ranks):
        draw = torch.Generator().manual_seed(rank)
        size = task.num_ranks * task.chunk(rank).size if algorithm.collective == "all_to_all" else 0
        found.append((torch.randn(max(task.count, size), generator=draw) * 50).to(dtype))
    return found


def every_algorithm(rank: int, num_ranks: int) -> list[str]:
    """What differs from the pure interpreter."""
    wire = Wire(dist.new_group(), dist.new_group(), device_type="cpu", segment_bytes=256)
    wrong = []
    for ways in ALGORITHMS.values():
        for algorithm in ways.values():
            for size in SIZES:
                for dtype in (torch.float32, torch.bfloat16, torch.int32):
                    task = CollectiveTask(num_ranks=num_ranks, count=size, root=1, per_node=2)
                    given = sources(task, dtype, algorithm)
                    wanted = run_together(algorithm, task, given, add=torch.add)[rank]
                    target = given[rank].clone()
                    before = wire.sent_bytes
                    wire.run(algorithm, task, target if algorithm.in_place else given[rank], target)
                    sent = wire.sent_bytes - before
                    if not torch.equal(target, wanted):
                        wrong.append(f"{algorithm.collective} {algorithm.name} {size} {dtype}: other bits")
                    if sent != count(algorithm, task).sent[rank] * dtype.itemsize:
                        wrong.append(f"{algorithm.collective} {algorithm.name} {size} {dtype}: {sent} bytes")
    return wrong


def test_messages_have_the_bits_and_bytes_of_the_rounds() -> None:
    assert run_ranks(every_algorithm, NUM_RANKS, timeout_s=120) == [[]] * NUM_RANKS


def group_sums(rank: int, num_ranks: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    ways = Ways(up=dist.new_group(), down=dist.new_group())  # type: ignore[arg-type]
    given = [torch.arange(1000.0) * (peer + 1) / 7 for peer in range(num_ranks)]
    found: dict[str, Any] = {}
    for name, algorithm in ALGORITHMS["all_reduce"].items():
        sums = GroupSum(group, algorithm=name, ways=ways)
        values = given[rank].clone()
        ledger = TrafficLedger(axes={}, phase=lambda: "backward")
        with CollectiveObserver() as seen, OperatorWatch(ledger):
            sums.sum(values)
            pending = [sums.begin(given[rank].clone()) for _ in range(3)]
            later = [one.wait() for one in pending]
        task = CollectiveTask(num_ranks=num_ranks, count=1000, per_node=num_ranks)  # one host
        wanted = run_together(algorithm, task, given, add=torch.add)[rank]
        found[name] = (
            all(torch.equal(one, wanted) for one in (values, *later)), dict(seen.counts), ledger.rows()[0]["bytes"]
        )  # fmt: skip
    return found


def test_sums_are_observed_as_one_all_reduce_each() -> None:
    shares = {"ring": 1.5, "star": 3, "naive": 3, "tree": 2, "halving": 1.5, "hierarchical": 1.5}
    wanted = {name: (True, {"all_reduce": 4}, 4 * 4000 * share) for name, share in shares.items()}
    assert run_ranks(group_sums, NUM_RANKS) == [wanted] * NUM_RANKS


def bench(_rank: int, _num_ranks: int) -> dict[str, Any]:
    spec = BenchSpec(
        collectives=tuple(ALGORITHMS), algorithms=("backend", *ALGORITHMS["all_reduce"], "direct", "pairs"),
        sizes=(1000, 40_000), dtype="bfloat16", repeats=1, per_node=2,
    )  # fmt: skip
    return run_bench(spec)


def test_a_bench_has_a_row_per_algorithm_with_the_bytes_of_the_formula() -> None:
    answer = run_ranks(bench, NUM_RANKS)[0]
    rows = answer["rows"]
    assert len(rows) == 2 * (8 + sum(map(len, ALGORITHMS.values())))
    for row in rows:
        assert row["equal"], row
        assert row["seconds"] > 0
        if row["algorithm"] != "backend":
            assert row["bytes_sent_per_rank"] == row["predicted_bytes_per_rank"], row
        elif row["collective"] == "all_reduce":  # by the kernel's counters, with headers
            assert row["bytes_sent_per_rank"] >= row["predicted_bytes_per_rank"]
    assert set(answer["fit"]) == {"alpha_s", "beta_s_per_byte"}
