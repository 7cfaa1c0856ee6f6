"""Every algorithm on every number of ranks, in one process: results, bits, orders, bytes and seconds."""

from __future__ import annotations

from fractions import Fraction
from math import lcm
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.algorithms.costs import count, predicted_bytes, predicted_seconds, simulate
from weft.comm.algorithms.registry import ALGORITHMS, COLLECTIVES, Algorithm
from weft.comm.algorithms.rounds import CollectiveTask, ElementRange, Receive, Send, even_chunks
from weft.comm.algorithms.together import MismatchError, run_together, transfers_of
from weft.core.cluster import Link

EVERY = [algorithm for ways in ALGORITHMS.values() for algorithm in ways.values()]
REDUCTIONS = ALGORITHMS["all_reduce"]
names = pytest.mark.parametrize("algorithm", EVERY, ids=lambda one: f"{one.collective}-{one.name}")


@st.composite
def tasks(draw: st.DrawFn) -> CollectiveTask:
    num_ranks = draw(st.one_of(st.integers(2, 9), st.integers(2, 64)))
    per_node = draw(st.sampled_from([size for size in range(1, num_ranks + 1) if num_ranks % size == 0]))
    root = draw(st.integers(0, num_ranks - 1))
    elements = draw(st.one_of(st.integers(0, 3), st.integers(0, 2 * num_ranks + 1)))
    return CollectiveTask(num_ranks=num_ranks, count=elements, root=root, per_node=per_node)


def start(task: CollectiveTask) -> list[list[int]]:
    """Distinct numbers."""
    return [[1000 * rank + index for index in range(task.count)] for rank in range(task.num_ranks)]


def sized_for(task: CollectiveTask, algorithm: Algorithm, rank: int) -> int:
    return task.num_ranks * task.chunk(rank).size if algorithm.collective == "all_to_all" else task.count


@names
@settings(max_examples=25, deadline=None)
@given(task=tasks())
def test_results_are_those_of_the_definition(algorithm: Algorithm, task: CollectiveTask) -> None:
    sources = start(task)
    if not algorithm.in_place:  # buffers of the size of both
        sources = [
            source + [-1] * (sized_for(task, algorithm, rank) - task.count) for rank, source in enumerate(sources)
        ]
    found = run_together(algorithm, task, sources, add=lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
    ranks = range(task.num_ranks)
    full = [[1000 * rank + index for index in range(task.count)] for rank in ranks]
    total = [sum(column) for column in zip(*full, strict=True)]
    joined = [1000 * rank + index for rank in ranks for index in range(*task.chunk(rank))]
    for rank, target in enumerate(found):
        own = slice(*task.chunk(rank))
        match algorithm.collective:
            case "broadcast":
                assert target == full[task.root]
            case "scatter":
                assert target[own] == full[task.root][own]
            case "gather":
                assert rank != task.root or target == joined
            case "reduce":
                assert rank != task.root or target == total
            case "all_gather":
                assert target == joined
            case "reduce_scatter":
                assert target[own] == total[own]
            case "all_reduce":
                assert target == total
            case "all_to_all":
                assert target[: sized_for(task, algorithm, rank)] == [
                    1000 * peer + index for peer in ranks for index in range(*task.chunk(rank))
                ]
            case other:
                raise AssertionError(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8])
@pytest.mark.parametrize("algorithm", REDUCTIONS.values(), ids=lambda one: one.name)
@settings(max_examples=8, deadline=None)
@given(task=tasks(), seed=st.integers(0, 99))
def test_all_ranks_end_with_the_same_bits(
    algorithm: Algorithm, dtype: torch.dtype, task: CollectiveTask, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    sources = [(torch.randn(task.count, generator=draw) * 50).to(dtype) for _ in range(task.num_ranks)]
    found = run_together(algorithm, task, sources, add=torch.add)
    assert all(torch.equal(found[0], other) for other in found)


def orders(algorithm: Algorithm, task: CollectiveTask) -> list[Any]:
    """The expression by which each element is summed, as nested pairs."""
    sources = [[rank] * task.count for rank in range(task.num_ranks)]
    found = run_together(algorithm, task, sources, add=lambda a, b: list(zip(a, b, strict=True)))
    for other in found[1:]:
        assert [sorted_pair(one) for one in other] == [sorted_pair(one) for one in found[0]]
    return [sorted_pair(one) for one in found[0]]


def sorted_pair(term: Any) -> Any:
    """Addition commutes to the bit: a pair is sorted, nesting stays."""
    return term if isinstance(term, int) else tuple(sorted((sorted_pair(one) for one in term), key=repr))


def in_turn(ranks: list[int]) -> Any:
    total: Any = ranks[0]
    for rank in ranks[1:]:
        total = sorted_pair((total, rank))
    return total


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_sums_have_the_stated_order(num_ranks: int) -> None:
    task, everyone = CollectiveTask(num_ranks=num_ranks, count=num_ranks), list(range(num_ranks))
    around = [in_turn([(chunk + 1 + step) % num_ranks for step in everyone]) for chunk in everyone]
    assert orders(REDUCTIONS["ring"], task) == around
    assert orders(REDUCTIONS["naive"], task) == [in_turn(everyone)] * num_ranks
    root = num_ranks - 1
    from_root = CollectiveTask(num_ranks=num_ranks, count=1, root=root)
    assert orders(REDUCTIONS["star"], from_root) == [in_turn([root, *everyone[:-1]])]


def test_sums_of_trees_have_the_stated_order() -> None:
    assert orders(REDUCTIONS["tree"], CollectiveTask(num_ranks=6, count=1)) == [sorted_pair((((0, 1), (2, 3)), (4, 5)))]
    assert orders(REDUCTIONS["halving"], CollectiveTask(num_ranks=4, count=4)) == [sorted_pair(((0, 2), (1, 3)))] * 4
    folded = orders(REDUCTIONS["halving"], CollectiveTask(num_ranks=5, count=4))  # rank 1 is folded into rank 0
    assert folded == [sorted_pair((((0, 1), 3), (2, 4)))] * 4
    by_node = orders(REDUCTIONS["hierarchical"], CollectiveTask(num_ranks=4, count=4, per_node=2))
    assert set(map(repr, by_node)) == {repr(sorted_pair(((0, 1), (2, 3))))}


@names
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7, 8, 12, 31, 32])
def test_bytes_and_steps_are_those_of_the_closed_forms(algorithm: Algorithm, num_ranks: int) -> None:
    power = 1 << (num_ranks.bit_length() - 1)
    nodes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0] if algorithm.uses_nodes else [1]
    for per_node in nodes:
        task = CollectiveTask(num_ranks=num_ranks, count=lcm(num_ranks, power), per_node=per_node)
        found = count(algorithm, task)
        assert predicted_bytes(algorithm, task, itemsize=2) == 2 * found.most_sent
        steps = sum(path.steps for path in algorithm.path(num_ranks, per_node))
        within_the_rank = algorithm.collective == "all_to_all"  # its first round
        assert found.num_rounds == steps + within_the_rank


@names
@settings(max_examples=25, deadline=None)
@given(task=tasks())
def test_uneven_counts_add_at_most_an_element_per_message(algorithm: Algorithm, task: CollectiveTask) -> None:
    found = count(algorithm, task)
    gap = abs(Fraction(found.most_sent) - predicted_bytes(algorithm, task, itemsize=1))
    assert gap <= 2 * task.num_ranks
    if algorithm.collective != "all_to_all":
        assert sum(found.sent) == sum(found.received)


@names
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8])
def test_simulated_seconds_are_those_of_the_closed_forms(algorithm: Algorithm, num_ranks: int) -> None:
    wire = Link(name="wire", latency_s=1e-3, bytes_per_s=1e6)
    per_node = 2 if num_ranks % 2 == 0 else 1
    task = CollectiveTask(num_ranks=num_ranks, count=48_000, per_node=per_node)
    simulated = simulate(algorithm, task, itemsize=4, link=lambda a, b: wire)
    predicted = predicted_seconds(algorithm, task, itemsize=4, inside=wire, between=wire)
    assert simulated == pytest.approx(predicted, rel=0.01 if algorithm.name != "tree" else 0.35)


def test_a_slow_link_between_nodes_decides() -> None:
    """The ring sends 2 S (N - 1) / N over it, the hierarchical form 2 S (m - 1) / (g m)."""
    fast, slow = Link(name="fast", latency_s=0, bytes_per_s=1e12), Link(name="slow", latency_s=0, bytes_per_s=1e6)
    task = CollectiveTask(num_ranks=8, count=8 * 1000, per_node=4)
    found = {
        name: simulate(REDUCTIONS[name], task, itemsize=1, link=lambda a, b: fast if a // 4 == b // 4 else slow)
        for name in ("ring", "hierarchical")
    }
    assert found["ring"] == pytest.approx(2 * 7 * 1000 / 1e6, rel=1e-3)
    assert found["hierarchical"] == pytest.approx(2 * 1000 / 1e6, rel=1e-3)


def test_eight_collectives() -> None:
    assert set(COLLECTIVES) == {
        "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
    }  # fmt: skip
    assert set(REDUCTIONS) == {"ring", "star", "naive", "tree", "halving", "hierarchical"}


def test_nodes_of_unequal_size_are_refused() -> None:
    assert "do not divide 6" in REDUCTIONS["hierarchical"].refusal(6, 4)
    assert REDUCTIONS["hierarchical"].refusal(6, 3) == REDUCTIONS["ring"].refusal(6, 4) == ""


def broken(rounds: Any) -> Algorithm:
    ring = REDUCTIONS["ring"]
    return Algorithm(collective="all_reduce", name="broken", rounds=rounds, order="", sent=ring.sent, path=ring.path)


@pytest.mark.parametrize(
    "rounds",
    [
        lambda task, rank: iter([(Send(1 - rank, ElementRange(0, 1)),)]),
        lambda task, rank: iter([(Send(1 - rank, ElementRange(0, 1)), Receive(1 - rank, ElementRange(0, 2)))]),
        lambda task, rank: iter([(Send(1 - rank, ElementRange(0, 1)), Receive(1 - rank, ElementRange(0, 1)))]),
        lambda task, rank: iter([()] * rank),
    ],
    ids=["never received", "other sizes", "overwrites what it sends", "unequal rounds"],
)
def test_rounds_that_do_not_match_are_errors(rounds: Any) -> None:
    with pytest.raises(MismatchError):
        list(transfers_of(broken(rounds), CollectiveTask(num_ranks=2, count=4)))


@given(start=st.integers(0, 9), size=st.integers(0, 99), parts=st.integers(1, 70))
def test_chunks_cover_the_span_evenly(start: int, size: int, parts: int) -> None:
    chunks = even_chunks(ElementRange(start, start + size), parts)
    assert [index for chunk in chunks for index in range(*chunk)] == list(range(start, start + size))
    assert max(chunk.size for chunk in chunks) - min(chunk.size for chunk in chunks) <= 1
