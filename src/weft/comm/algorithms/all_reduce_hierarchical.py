"""All-reduce by node: a ring inside each node, a ring between nodes for each chunk, a ring inside each node.

With g ranks to a node and m = N / g nodes, the ranks at the same place of all nodes share a chunk of S / g.
Sends: 2 S (g - 1) / g inside, 2 S (m - 1) / (g m) between nodes: the least that can leave a node.
Steps: 2 (g - 1) inside, 2 (m - 1) between.
Order: within a node as the ring does, then the nodes' sums as the ring does.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Round, circulate, even_chunks


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    size = task.per_node
    node, place = divmod(rank, size)
    num_nodes = task.num_ranks // size
    chunks = even_chunks(task.whole, size)
    inside = [node * size + index for index in range(size)]
    between = [index * size + place for index in range(num_nodes)]
    parts = even_chunks(chunks[place], num_nodes)
    yield from circulate(chunks, inside, place, first=-1, adds=True)
    yield from circulate(parts, between, node, first=-1, adds=True)
    yield from circulate(parts, between, node, first=0, adds=False)
    yield from circulate(chunks, inside, place, first=0, adds=False)
