"""Draws an algorithm chunk by chunk, from its messages: what is sent in each step, and what every rank has then.

A cell is a chunk of a rank: "2" is rank 2's own, "0+2" a sum, "Σ" the sum of all ranks; "." is empty or not yet valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.comm.algorithms.registry import Algorithm
from weft.comm.algorithms.rounds import CollectiveTask, ElementRange
from weft.comm.algorithms.together import Carried, apply_round, transfers_of

_EMPTY: frozenset[str] = frozenset()
Cell = frozenset[str]  # the terms of a sum


def drawn(algorithm: Algorithm, task: CollectiveTask) -> str:
    """The steps as text."""
    sent, paths = algorithm.sent(task.num_ranks, task.per_node), algorithm.path(task.num_ranks, task.per_node)
    legend = "⇒ adds, → replaces; Σ is the sum of all ranks" if "reduce" in algorithm.collective else "→ replaces"
    lines = [
        f"{algorithm.collective} by {algorithm.name}, {task.num_ranks} ranks, {task.count} chunks of S / {task.count}",
        f"the busiest rank sends {sent} S in {sum(path.steps for path in paths)} steps; sum: {algorithm.order}",
        f"[chunks]: {legend}; . is empty",
        "",
        *_buffers(task, _sources(algorithm, task)),
    ]
    for number, (transfers, targets) in enumerate(_steps(algorithm, task), start=1):
        lines += [
            "",
            f"step {number}: {', '.join(_arrow(one, task) for one in _joined(transfers)) or 'within the ranks'}",
        ]
        lines += _buffers(task, targets)
    return "\n".join(lines)


def as_tables(algorithm: Algorithm, task: CollectiveTask) -> dict[str, Any]:
    """The same for JSON: elements are chunks."""
    return {
        "collective": algorithm.collective,
        "algorithm": algorithm.name,
        "ranks": task.num_ranks,
        "order": algorithm.order,
        "sent_share": float(algorithm.sent(task.num_ranks, task.per_node)),
        "rounds": [
            {
                "messages": [
                    {
                        "source": one.source,
                        "target": one.target,
                        "sent": list(one.sent),
                        "received": list(one.received),
                        "adds": one.adds,
                    }
                    for one in transfers
                ],
                "buffers": [[_text(cell, task) for cell in target] for target in targets],
            }
            for transfers, targets in _steps(algorithm, task)
        ],
    }


def _steps(algorithm: Algorithm, task: CollectiveTask) -> list[tuple[tuple[Carried, ...], list[list[Cell]]]]:
    sources = _sources(algorithm, task)
    targets = [list(source) if algorithm.in_place else [_EMPTY] * len(source) for source in sources]
    found = []
    for transfers in transfers_of(algorithm, task):
        apply_round(transfers, targets if algorithm.in_place else sources, targets, add=_sum)
        found.append((transfers, [list(target) for target in targets]))
    return found


def _sum(own: Sequence[Cell], arrived: Sequence[Cell]) -> list[Cell]:
    return [a | b for a, b in zip(own, arrived, strict=True)]


def _sources(algorithm: Algorithm, task: CollectiveTask) -> list[list[Cell]]:
    """What each rank brings along."""
    ranks, chunks = range(task.num_ranks), range(task.count)
    return [[_brought(algorithm.collective, task, rank, chunk) for chunk in chunks] for rank in ranks]


def _brought(collective: str, task: CollectiveTask, rank: int, chunk: int) -> Cell:
    own = frozenset({str(rank)})
    is_own = chunk in range(*task.chunk(rank))
    match collective:
        case "broadcast" | "scatter":
            return frozenset({chr(ord("a") + chunk)}) if rank == task.root else _EMPTY
        case "gather" | "all_gather":
            return own if is_own else _EMPTY
        case "all_to_all":
            return frozenset({f"{rank}→{chunk}"})
        case _:
            return own


def _text(cell: Cell, task: CollectiveTask) -> str:
    if not cell:
        return "."
    if len(cell) == task.num_ranks > 1:
        return "Σ"
    return "+".join(sorted(cell, key=lambda term: (len(term), term)))


def _buffers(task: CollectiveTask, targets: Sequence[Sequence[Cell]]) -> list[str]:
    cells = [[_text(cell, task) for cell in target] for target in targets]
    width = max(3, *(len(cell) for row in cells for cell in row)) + 1
    rows = ("".join(cell.ljust(width) for cell in row).rstrip() for row in cells)
    return [f"  rank {rank:>2}  {row}" for rank, row in enumerate(rows)]


def _joined(transfers: Sequence[Carried]) -> list[Carried]:
    return sorted((one for one in transfers if one.sent.size and one.source != one.target), key=lambda one: one[:2])


def _arrow(one: Carried, task: CollectiveTask) -> str:
    return f"{one.source} {'⇒' if one.adds else '→'} {one.target} [{_chunks(one.sent, task)}]"


def _chunks(span: ElementRange, task: CollectiveTask) -> str:
    if span == task.whole:
        return "all"
    return str(span.start) if span.size == 1 else f"{span.start}–{span.stop - 1}"
