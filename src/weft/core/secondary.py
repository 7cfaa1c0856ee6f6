"""The rule of `data_parallel.secondary_shard`: plans and columns of plans are judged by the same numbers."""

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
    legal = [number for number in range(2, shards) if shards % number == 0]
    if size not in legal:
        groups = f"groups of {' or '.join(map(str, legal))}" if legal else "no smaller groups"
        yield (
            f"{name}, but {shards} shards (mesh.dp_shard x cp) divide into {groups}",
            f"set it to {' or '.join(map(str, legal))}, {drop}" if legal else drop.removeprefix("or "),
        )
