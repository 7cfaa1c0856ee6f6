"""The drawing of an algorithm: cells are the sums that the pure interpreter has, and the last step is the result."""

from __future__ import annotations

import json

import pytest

from weft.comm.algorithms.draw import as_tables, drawn
from weft.comm.algorithms.registry import ALGORITHMS
from weft.comm.algorithms.rounds import CollectiveTask

FOUR = CollectiveTask(num_ranks=4, count=4, per_node=2)


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
def test_every_all_reduce_ends_with_all_sums(name: str) -> None:
    algorithm = ALGORITHMS["all_reduce"][name]
    table = json.loads(json.dumps(as_tables(algorithm, FOUR)))
    assert table["rounds"][-1]["buffers"] == [["Σ"] * 4] * 4
    text = drawn(algorithm, FOUR)
    assert text.count("rank  3") == len(table["rounds"]) + 1
    assert algorithm.order in text


def test_the_first_steps_of_a_ring() -> None:
    lines = drawn(ALGORITHMS["all_reduce"]["ring"], FOUR).splitlines()
    first = lines.index("step 1: 0 ⇒ 1 [3], 1 ⇒ 2 [0], 2 ⇒ 3 [1], 3 ⇒ 0 [2]")
    assert lines[first + 1].split() == ["rank", "0", "0", "0", "0+3", "0"]
    assert "the busiest rank sends 3/2 S in 6 steps" in lines[1]


def test_an_all_to_all_transposes() -> None:
    task = CollectiveTask(num_ranks=3, count=3)
    table = as_tables(ALGORITHMS["all_to_all"]["pairs"], task)
    assert table["rounds"][-1]["buffers"] == [[f"{source}→{rank}" for source in range(3)] for rank in range(3)]


def test_a_scatter_leaves_each_rank_its_chunk() -> None:
    task = CollectiveTask(num_ranks=3, count=3)
    table = as_tables(ALGORITHMS["scatter"]["direct"], task)
    assert table["rounds"][-1]["buffers"] == [["a", "b", "c"], [".", "b", "."], [".", ".", "c"]]
