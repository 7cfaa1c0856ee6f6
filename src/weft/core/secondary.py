"""The rules of `data_parallel.secondary_shard` and `reduce_neighbours`, groups of neighbours: plans and columns of
plans are judged by the same numbers."""

from __future__ import annotations

from collections.abc import Iterator


def check_secondary(size: int, *, zero: int, shards: int) -> Iterator[tuple[str, str]]:
    """Reasons against a secondary shard over `size` of `shards` ranks, as (sentence, hint)."""
    if not size:
        return
    name, drop = f"data_parallel.secondary_shard = {size}", "or remove data_parallel.secondary_shard"
    if zero != 3:
        yield (
            f"{name} is for data_parallel.zero = 3, whose backward gathers weights again, but zero is {zero}",
            f"set data_parallel.zero = 3, {drop}",
        )
        return
    yield from _check_division(size, shards, name, f"{shards} shards (mesh.dp_shard x cp)", drop)


def check_neighbours(size: int, *, is_coded: bool, ranks: int) -> Iterator[tuple[str, str]]:
    """Reasons against sums in codes by node, `size` neighbours of `ranks` that reduce, as (sentence, hint)."""
    if not size:
        return
    name, drop = f"data_parallel.reduce_neighbours = {size}", "or remove data_parallel.reduce_neighbours"
    if not is_coded:
        yield (
            f"{name} is for gradients that travel in a lower format, but precision.reduce is float32",
            f"set precision.reduce = 'int8', {drop}",
        )
        return
    yield from _check_division(
        size, ranks, name, f"{ranks} ranks reduce (shards, or replicas without them), which", drop
    )


def _check_division(size: int, ranks: int, name: str, who: str, drop: str) -> Iterator[tuple[str, str]]:
    legal = [number for number in range(2, ranks) if ranks % number == 0]
    if size not in legal:
        groups = f"groups of {' or '.join(map(str, legal))}" if legal else "no smaller groups"
        yield (
            f"{name}, but {who} divide into {groups}",
            f"set it to {' or '.join(map(str, legal))}, {drop}" if legal else drop.removeprefix("or "),
        )
