"""Dispatchers: layers around a module of experts that send each token to the ranks of its experts.

| kind     | travels, per token              | at the experts' rank                 | sizes                      |
| -------- | ------------------------------- | ------------------------------------ | -------------------------- |
| `pairs`  | one row per expert              | outputs; weights are applied at home | depend on the router       |
| `tokens` | one row per rank that holds one | weighted outputs, summed per token   | depend on the router       |
| `gather` | all rows to all ranks           | the same; a reduce-scatter adds up   | do not: equal on all ranks |

The module computes one row per (token, expert), sorted by the rank's own numbers of experts and without weights. Its
kernel, gate, biases and norm are not known here. Gradients are plain sums; nothing is scaled. `del` frees rows that no
backward needs before the next tensor of their size is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import weft.engine.ep.counts as counts_of_ranks
from weft.core.experts import Routing, WireFormat
from weft.core.shards import Span, balanced_span
from weft.engine import collectives
from weft.engine.ep.exchange import (
    Counts,
    Group,
    begin_gather,
    begin_rows,
    begin_scatter,
    begin_tokens,
    exchange_counts,
    finish,
    send_routing,
)
from weft.engine.ep.rows import sorted_order, sum_rows, take_rows

Experts = Callable[[Tensor, Tensor], Tensor]  # outputs of rows, one expert per row; the experts' numbers ascend
Overlapped = Callable[[], None]  # work of the same block that is done while tokens travel


def no_overlap() -> None:
    pass


class Dispatcher:
    """Divides the experts of one module over the ranks of a group.

    `wire`: format of the way to the experts. `chunks`: parts of the tokens, of which one travels while the experts
    compute another; autograd's backward is the mirror image.
    """

    def __init__(self, num_experts: int, group: Group, *, wire: WireFormat = "activations", chunks: int = 1) -> None:
        self.num_experts, self.wire, self.chunks = num_experts, wire, chunks
        self.group, self.degree, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.spans = [balanced_span(num_experts, degree=self.degree, place=place) for place in range(self.degree)]
        self._first_experts: Tensor | None = None

    @property
    def own(self) -> Span:
        return self.spans[self.rank]

    def __call__(
        self, experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor, overlapped: Overlapped = no_overlap
    ) -> Tensor:
        given = [(hidden, index, weights)]
        if self.chunks > 1:
            given = list(zip(*(value.tensor_split(self.chunks) for value in (hidden, index, weights)), strict=True))
        parts = [self.dispatch(experts, *part) for part in given]
        for part in parts:
            next(part)
        overlapped()
        for part in parts:
            next(part)
        made = [next(part) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def dispatch(self, experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor) -> Iterator[Tensor]:
        """Yields when tokens travel, when the outputs of experts travel, and the result. The first two are empty."""
        raise NotImplementedError

    def routing(self, index: Tensor) -> Routing:
        tokens, top_k = index.shape
        return Routing(tokens=tokens, top_k=top_k, num_experts=self.num_experts, ep=self.degree, rank=self.rank)

    def owners(self, index: Tensor) -> Tensor:
        """The rank of each expert."""
        return torch.bucketize(index, self._begins(index.device)[1:], right=True)

    def local_numbers(self, index: Tensor) -> Tensor:
        """The number of each expert on its own rank."""
        return index - self._begins(index.device)[self.owners(index)]

    def _begins(self, device: torch.device) -> Tensor:
        """The first expert of each rank. Copied from the host once, which waits for a GPU."""
        if self._first_experts is None:
            self._first_experts = torch.tensor([span.begin for span in self.spans], device=device)
        return self._first_experts


class Pairs(Dispatcher):
    """One row per token and expert travels; the weights stay at home."""

    def dispatch(self, experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor) -> Iterator[Tensor]:
        most = self.spans[0].size
        keys = self.owners(index) * most + self.local_numbers(index)  # by rank, then by expert
        order = sorted_order(keys, index.numel())
        own = _histogram(keys.flatten(), self.degree * most).view(self.degree, most)
        theirs = exchange_counts(own, self.group)
        sent_counts, received_counts = counts_of_ranks.read_counts(
            self.routing(index), pairs_sent=own.sum(1), pairs_received=theirs.sum(1)
        )
        counts = Counts(sent=sent_counts, received=received_counts)
        begun, num_received = begin_tokens(hidden, order, counts, self.group, self.wire), sum(counts.received)
        yield begun.link
        numbers = torch.arange(most, device=index.device).repeat(self.degree)
        numbers = numbers.repeat_interleave(theirs.flatten(), output_size=num_received).unsqueeze(1)
        own_order = sorted_order(numbers, num_received)
        received = finish(begun)
        rows = take_rows(received, own_order)
        del received
        by_source = sum_rows(compute(experts, rows, numbers.flatten()[own_order.slots]), own_order)
        del rows
        begun = begin_rows(by_source, counts.back, self.group)
        yield begun.link
        yield sum_rows(finish(begun), order, weights)


class Tokens(Dispatcher):
    """One row per token and rank travels; a rank adds up its experts' outputs before the way back."""

    def dispatch(self, experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor) -> Iterator[Tensor]:
        owners = self.owners(index)
        places = torch.arange(self.degree, device=index.device)
        is_sent = torch.zeros(len(index), self.degree, dtype=torch.bool, device=index.device).scatter_(1, owners, True)
        # rows and pairs to each rank: with both no other number is read from the device
        own = torch.stack([is_sent.sum(0), _histogram(owners.flatten(), self.degree)], dim=1)
        theirs = exchange_counts(own, self.group)
        order = sorted_order(torch.where(is_sent, places, -1))  # by rank, then by token; before the host waits
        sent_counts, received_counts, pair_counts = counts_of_ranks.read_counts(
            self.routing(index), rows_sent=own[:, 0], rows_received=theirs[:, 0], pairs_received=theirs[:, 1]
        )
        counts = Counts(sent=sent_counts, received=received_counts)
        order = order.first(sum(counts.sent))
        token = order.tokens
        is_theirs = owners[token] == (order.slots % self.degree).unsqueeze(1)
        numbers = torch.where(is_theirs, self.local_numbers(index)[token], -1)
        numbers, own_weights = send_routing(numbers, take_rows(weights, order), counts, self.group)
        begun = begin_tokens(hidden, order, counts, self.group, self.wire)
        yield begun.link
        own_order = sorted_order(numbers, sum(pair_counts))
        received = finish(begun)
        rows = take_rows(received, own_order)
        del received
        sums = sum_rows(compute(experts, rows, numbers.flatten()[own_order.slots]), own_order, own_weights)
        del rows
        begun = begin_rows(sums, counts.back, self.group)
        yield begun.link
        yield sum_rows(finish(begun), order)


class Gather(Dispatcher):
    """All rows travel to all ranks, which must have the same number of them; sizes do not depend on the router."""

    def dispatch(self, experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor) -> Iterator[Tensor]:
        all_weights = collectives.gather(weights, self.group, 0)
        numbers = collectives.gathered(index, self.group, 0) - self.own.begin
        is_own = (numbers >= 0) & (numbers < self.own.size)
        begun = begin_gather(hidden, self.group, self.wire)
        yield begun.link
        numbers = torch.where(is_own, numbers, -1)
        order = sorted_order(numbers)
        (pair_counts,) = counts_of_ranks.read_counts(
            self.routing(index), pairs_received=is_own.view(self.degree, -1).sum(1)
        )
        order = order.first(sum(pair_counts))
        gathered = finish(begun)
        rows = take_rows(gathered, order)
        del gathered
        sums = sum_rows(compute(experts, rows, numbers.flatten()[order.slots]), order, all_weights)
        del rows
        begun = begin_scatter(sums, self.group)
        yield begun.link
        yield finish(begun)


DISPATCHERS: dict[str, type[Dispatcher]] = {"pairs": Pairs, "tokens": Tokens, "gather": Gather}


def dispatch_share(
    dispatcher: Dispatcher,
    experts: Experts,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    overlapped: Overlapped = no_overlap,
    *,
    group: Group,
) -> Tensor:
    """Dispatch for ranks of `group` that are given the same rows: each sends a share of them, and all get every result.

    Rows of zeros with weight zero make the shares equal.
    """
    missing = -len(hidden) % dist.get_world_size(group)
    padded = [F.pad(rows, (0, 0, 0, missing)) if missing else rows for rows in (hidden, index, weights)]
    own = (
        collectives.take(padded[0], group, 0),
        collectives.contiguous_slice(padded[1], group, 0),
        collectives.take(padded[2], group, 0),
    )
    return collectives.collect(dispatcher(experts, *own, overlapped), group, 0)[: len(hidden)]


def compute(experts: Experts, rows: Tensor, numbers: Tensor) -> Tensor:
    """The experts' outputs of `rows`, which are sorted by `numbers`.

    Without rows it computes one of zeros, which is dropped: every rank has the same graph, and experts without a token
    have a gradient of zero. With None an optimizer would not decay their momentum.
    """
    if len(rows):
        return experts(rows, numbers)
    return experts(torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1))[:0]


def _histogram(values: Tensor, size: int) -> Tensor:
    """How often each number below `size` occurs; `bincount` would wait for a GPU."""
    return torch.zeros(size, dtype=torch.int64, device=values.device).scatter_add_(0, values, torch.ones_like(values))
