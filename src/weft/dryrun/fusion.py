"""Memory of a compiled graph: the buffers that its kernels write, their order and their lifetimes.

Inductor generates kernels for elementwise operators and calls libraries for the rest. So

    in memory      inputs, results of libraries, inputs of libraries, outputs of the graph
    in registers   everything else: it is recomputed in every kernel that needs it
    one kernel     results of one size that read the same memory, unless one depends on the other through a third
    overwritten    a buffer that only one result still reads, if that has the same size, dtype and strides

Values are not computed: results of kernels are empty, libraries are called unchanged. Fusion follows Inductor's choices
in plain cases (tests/unit/dryrun/test_fusion.py); its search for the order with the least peak is not repeated: kernels
run as early as their position in the graph allows.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

# Besides the operators that torch tags as pointwise: copies, slices, lookups, constants, and reductions along rows,
# which end a kernel but are small.
_GENERATED = frozenset(
    {
        "aten.clone", "aten._to_copy", "aten.copy", "aten.cat", "aten.constant_pad_nd", "aten.slice_scatter",
        "aten.select_scatter", "aten.index", "aten.gather", "aten.embedding", "aten.full", "aten.full_like",
        "aten.empty", "aten.zeros", "aten.ones", "aten.arange", "aten.scalar_tensor", "aten.sum", "aten.mean",
        "aten.amax", "aten.amin", "aten.any", "aten.all", "aten.prod", "prims.convert_element_type", "prims.iota",
    }
)  # fmt: skip
MOST_NEIGHBOURS = 64  # fusion candidates per reader of a tensor; Inductor's limit


@dataclass(eq=False)
class Kernel:
    """`gives` are the buffers it writes, each with the buffers that are read for it."""

    place: int
    gives: dict[Node, set[Node]]
    call: Node | None = None  # the call of a library; None: generated
    overwrites: list[Node] = field(default_factory=list)
    frees: list[Node] = field(default_factory=list)

    @property
    def reads(self) -> set[Node]:
        return set().union(*self.gives.values()) - self.gives.keys()

    @property
    def size(self) -> int:
        return _tensor(next(iter(self.gives))).numel()


class ProgramError(Exception):
    """The rules do not cover a graph."""


class Program:
    """A backend's result for a graph: called with a list of inputs, which it empties."""

    def __init__(self, module: GraphModule) -> None:
        self._boxed_call = True  # torch's mark of this calling convention
        self._module = module
        nodes = list(module.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._constants = [node for node in nodes if node.op == "get_attr"]
        self._outputs = nodes[-1].args[0]
        self.kernels = _or_refused(kernels_of, module.graph)
        read = {node for kernel in self.kernels for node in kernel.reads} | _given(module.graph)
        self._unused = [node for node in self._inputs if node not in read]

    def __call__(self, given: list[Any]) -> Any:
        return _or_refused(self._run, given)

    def _run(self, given: list[Any]) -> Any:
        values: dict[Node, Any] = dict(zip(self._inputs, given, strict=True))
        given.clear()
        for node in self._unused:
            del values[node]
        values |= {node: getattr(self._module, str(node.target)) for node in self._constants}
        for kernel in self.kernels:
            for node in kernel.overwrites:
                del values[node]
            if kernel.call is None:
                values |= {node: _empty(node) for node in kernel.gives}
            else:
                result = _apply(kernel.call, values)
                values |= {node: result if node is kernel.call else result[node.args[1]] for node in kernel.gives}
                del result
            for node in kernel.frees:
                values.pop(node, None)
        return map_arg(self._outputs, lambda node: _value(node, values))


def _or_refused(function: Callable[[Any], Any], given: Any) -> Any:
    try:
        return function(given)
    except Exception as error:
        raise ProgramError(f"{type(error).__name__}: {error}") from error


def kernels_of(graph: Graph) -> list[Kernel]:
    """The kernels in execution order, each with the buffers that it reads last."""
    written = _written(graph)
    kernels = list(_single(graph, written))
    _join(kernels)
    ordered = _ordered(kernels)
    _end_lives(ordered, kept=_given(graph))
    return ordered


# --- buffers ----------------------------------------------------------------------------------------------------------


def _is_generated(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return torch.Tag.pointwise in target.tags or str(target.overloadpacket) in _GENERATED


def _is_view(node: Node) -> bool:
    """Whether the node is a view of a buffer; results of libraries are buffers."""
    if node.target is operator.getitem:
        base = node.args[0]
        return isinstance(base, Node) and _is_view(base)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def _written(graph: Graph) -> set[Node]:
    """Every node that is ever in memory."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            found.add(node)
        elif node.op == "output" or (_is_called(node) and node.target is not operator.getitem):
            found.update(_bases(node.all_input_nodes))
        if _is_called(node):
            found.add(node)
    return found


def _is_called(node: Node) -> bool:
    """Whether the node is a library's result, or one of its results."""
    return node.op not in ("placeholder", "get_attr", "output") and not _is_view(node) and not _is_generated(node)


def _bases(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield from _bases(node.all_input_nodes[:1]) if _is_view(node) else (node,)


def _given(graph: Graph) -> set[Node]:
    return set(_bases(graph.output_node().all_input_nodes))


def _reads(node: Node, written: set[Node]) -> set[Node]:
    """The buffers from which `node` is computed."""
    found: set[Node] = set()
    seen: set[Node] = set()
    todo = list(node.all_input_nodes)
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in written:
            found.add(one)
        else:
            todo += one.all_input_nodes
    return found


# --- kernels ----------------------------------------------------------------------------------------------------------


def _single(graph: Graph, written: set[Node]) -> Iterator[Kernel]:
    for place, node in enumerate(graph.nodes):
        if node not in written or node.op in ("placeholder", "get_attr"):
            continue
        if _is_generated(node):
            yield Kernel(place=place, gives={node: _reads(node, written)})
        elif node.target is not operator.getitem:
            parts = [user for user in node.users if user.target is operator.getitem]
            yield Kernel(place=place, gives=dict.fromkeys(parts or [node], _reads(node, written)), call=node)


def _join(kernels: list[Kernel]) -> None:
    """Fuse kernels that read the same buffers: those that share most bytes first, then the nearest."""
    maker = {node: kernel for kernel in kernels for node in kernel.gives}
    own = {
        kernel: 1 << index for index, kernel in enumerate(kernels)
    }  # sets as bit masks: graphs have thousands of kernels
    before: dict[Kernel, int] = {}
    for kernel in kernels:  # in graph order, so producers come first
        before[kernel] = 0
        for one in _makers(kernel, maker):
            before[kernel] |= before[one] | own[one]

    def waits(first: Kernel, second: Kernel) -> bool:
        """Whether one depends on the other through a third kernel: fused, they would form a cycle."""
        return any(
            before[one] & own[start]
            for start, end in ((first, second), (second, first))
            for one in _makers(end, maker)
            if one is not start
        )

    is_changed = True
    while is_changed:
        is_changed = False
        for first, second in _pairs(kernels):
            if first not in own or second not in own or waits(first, second):
                continue
            first.gives |= second.gives
            maker |= dict.fromkeys(second.gives, first)
            own[first] |= own.pop(second)
            before[first] = (before[first] | before.pop(second)) & ~own[first]
            for kernel, earlier in before.items():
                if earlier & own[first]:
                    before[kernel] |= before[first] | own[first]
            is_changed = True
        kernels[:] = own


def _makers(kernel: Kernel, maker: dict[Node, Kernel]) -> set[Kernel]:
    return {maker[node] for node in kernel.reads if node in maker} - {kernel}


def _pairs(kernels: list[Kernel]) -> list[tuple[Kernel, Kernel]]:
    """Pairs that could be fused, best first; of many readers of a buffer, each with the next few, as in Inductor."""
    users: dict[Node, list[Kernel]] = {}
    for kernel in kernels:
        for node in (*kernel.reads, *kernel.gives) if kernel.call is None else ():
            users.setdefault(node, []).append(kernel)
    found = {
        (first, second): _shared_bytes(first, second)
        for group in users.values()
        for index, first in enumerate(group)
        for second in group[index + 1 : index + 1 + MOST_NEIGHBOURS]
    }
    pairs = [pair for pair, shared in found.items() if shared]
    return sorted(pairs, key=lambda pair: (-found[pair], pair[1].place - pair[0].place, pair[0].place))


def _shared_bytes(first: Kernel, second: Kernel) -> int:
    """Bytes of buffers that both read, or one writes and the other reads; 0 for kernels of different sizes."""
    if first.size != second.size:
        return 0
    shared = (first.reads | first.gives.keys()) & (second.reads | second.gives.keys())
    return sum(_tensor(node).nbytes for node in shared)


def _ordered(kernels: list[Kernel]) -> list[Kernel]:
    """Topological order; among ready kernels the first of the graph runs next."""
    maker = {node: kernel for kernel in kernels for node in kernel.gives}
    waits = {kernel: {maker[node] for node in kernel.reads if node in maker} for kernel in kernels}
    followers: dict[Kernel, list[Kernel]] = {kernel: [] for kernel in kernels}
    for kernel, needed in waits.items():
        for one in needed:
            followers[one].append(kernel)
    ready = [(kernel.place, kernel) for kernel in kernels if not waits[kernel]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, kernel = heapq.heappop(ready)
        found.append(kernel)
        for follower in followers[kernel]:
            waits[follower].discard(kernel)
            if not waits[follower]:
                heapq.heappush(ready, (follower.place, follower))
    return found


def _end_lives(kernels: list[Kernel], *, kept: set[Node]) -> None:
    made = {node for kernel in kernels for node in kernel.gives}
    last = {node: kernel for kernel in kernels for node in (*kernel.gives, *sorted(kernel.reads, key=str))}
    replaced: set[Node] = set()
    for node, kernel in last.items():
        if node in kept or node.op == "get_attr":
            continue
        new = _replacement(kernel, node, replaced) if node in made else None  # inputs belong to the caller
        if new is not None:
            replaced.add(new)
        (kernel.frees if new is None else kernel.overwrites).append(node)


def _replacement(kernel: Kernel, node: Node, taken: set[Node]) -> Node | None:
    """The result that may overwrite `node`, if any. A library never writes over its inputs."""
    readers = [given for given, reads in kernel.gives.items() if node in reads]
    if kernel.call is not None or len(readers) != 1 or readers[0] in taken:
        return None
    old, new = _tensor(node), _tensor(readers[0])
    is_alike = old.shape == new.shape and old.stride() == new.stride()
    is_plain = old.numel() == new.numel() and old.is_contiguous() and new.is_contiguous()
    return readers[0] if old.dtype == new.dtype and (is_alike or is_plain) else None


# --- running it -------------------------------------------------------------------------------------------------------


def _tensor(node: Node) -> torch.Tensor:
    tensor: torch.Tensor = node.meta["val"]
    return tensor


def _empty(node: Node) -> torch.Tensor:
    like = _tensor(node)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _value(node: Node, values: dict[Node, Any]) -> Any:
    if node in values:
        return values[node]
    return _apply(node, values)  # a view


def _apply(node: Node, values: dict[Node, Any]) -> Any:
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    args: Any
    kwargs: Any
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: _value(one, values))
    if function is torch.ops.higher_order.auto_functionalized_v2:
        # an operator that writes into its inputs: the compiler writes in place, so the new values are the old tensors
        returned = [None] * max(1, len(args[0]._schema.returns))
        return (*returned, *kwargs["_all_bases"])
    return function(*args, **kwargs)
