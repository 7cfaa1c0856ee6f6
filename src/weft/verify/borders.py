"""Off-by-one cases planted into the global batches: ends of vocabulary shards, edges of rows and ranks.

    tokens    first and last vocabulary row of every shard, as input and as label, in every batch;
              all other rows in the held-out batches, which run forwards only
    labels    missing at row ends and at both sides of sequence-shard edges; half a batch without labels; an empty tail
    documents one row with document ends in its first, middle and last column

Training batches keep their text beside the planted tokens: if every token occurred once, many gradients would be near
zero, Adam would turn them into full updates of either sign, and rounding would grow from step to step until it looks
like a bug.

Planted values depend only on the position in the global batch, so ranks that hold the same rows plant the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weft.core.plan import Plan
from weft.core.tensor_grid import grid_sizes
from weft.verify.verdict import Check, Finding

IGNORED = -100
NO_TOKEN = -1
KEPT_COLUMNS = 8  # every 8th column keeps the text, so that a rank that reads wrong rows is noticed
MOST_EVALUATIONS = 8  # too few for all rows of a large vocabulary; `reach` reports the number of rows covered
EDGE_KINDS = 5  # no label missing; the first; the last; those before, and those after, edges of sequence shards

Batch = dict[str, torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


def slice_ends(vocab_size: int, *, outer: int, inner: int = 1) -> list[int]:
    """First and last row of every shard of a table over `outer` ranks, each shard again sharded over `inner` ranks."""
    ends = {
        begin + row
        for begin, size in _chunks(vocab_size, outer)
        for first, rows in _chunks(size, inner)
        for row in (first, first + rows - 1)
    }
    return sorted(ends)


def plan_ends(plan: Plan, vocab_size: int) -> set[int]:
    """Slice ends of one plan: tables sharded by tensor parallelism, the shards sharded over data-parallel ranks."""
    sizes = grid_sizes(plan.tensor_parallel.mode, plan.mesh.tp) if plan.mesh.tp > 1 else {}
    over = {"1d": sizes.get("t", 1), "3d": sizes.get("i", 1) ** 2}.get(plan.tensor_parallel.mode, sizes.get("i", 1))
    degrees = {(over, 1), (sizes.get("j", 1), 1), (over, plan.mesh.dp_shard)}
    return {row for outer, inner in degrees for row in slice_ends(vocab_size, outer=outer, inner=inner)}


@dataclass(frozen=True, kw_only=True)
class Borders:
    """Planted batches of `rows` x `length` tokens, the same for all plans of `num_ranks`: they share the reference."""

    vocab_size: int
    num_ranks: int
    rows: int
    length: int
    end_of_document: int | None = None  # only with isolated documents
    has_gaps: bool = False  # text has positions without a label, which planted tokens get
    is_paired: bool = False  # losses are divided by the number of pairs of rows, not of tokens

    @cached_property
    def ends(self) -> list[int]:
        """Slice ends of every plan of `num_ranks`; tables sharded over one axis come first."""
        factors = [count for count in range(1, self.num_ranks + 1) if self.num_ranks % count == 0]
        degrees = [(outer, inner) for inner in factors for outer in factors if self.num_ranks % (outer * inner) == 0]
        rows = (row for outer, inner in degrees for row in slice_ends(self.vocab_size, outer=outer, inner=inner))
        return list(dict.fromkeys(rows))

    @cached_property
    def _training_ids(self) -> torch.Tensor:
        ends = torch.tensor([end for end in self.ends if end != self.end_of_document])
        return ends if self.end_of_document is None else ends.repeat(2)  # a document end may occupy the position

    @cached_property
    def _evaluation_ids(self) -> torch.Tensor:
        """Slice ends, then all other rows."""
        is_left = torch.ones(self.vocab_size, dtype=torch.bool)
        is_left[[*self.ends, *([] if self.end_of_document is None else [self.end_of_document])]] = False
        return torch.cat([self._training_ids, is_left.nonzero().squeeze(1)])

    def training(self, *, steps: int) -> Iterator[Planted]:
        """One `Planted` per step: half the rows of the second step have no label, nor do the last rows of the last."""
        for step in range(steps):
            missing = self._missing(step, steps=steps, has_empty_half=steps > 2)
            yield self._planted(missing, self._training_ids.roll(step))

    def evaluation(self) -> Iterator[Planted]:
        """One `Planted` per held-out batch, at least two, until every row is covered; the second has an empty tail."""
        done, index = 0, 0
        while index < 2 or (done < len(self._evaluation_ids) and index < MOST_EVALUATIONS):
            missing = self._missing(index, steps=2, has_empty_half=False)
            planted = self._planted(missing, self._evaluation_ids[done:])
            yield planted
            done += int((planted.tokens != NO_TOKEN).sum())
            index += 1

    def _planted(self, missing: torch.Tensor, ids: torch.Tensor) -> Planted:
        is_free = ~missing[:, :-1] & (torch.arange(1, self.length) % KEPT_COLUMNS != 0)
        column, row = is_free.t().nonzero(as_tuple=True)  # column by column: every rank gets slice ends early
        count = min(len(row), len(ids))
        tokens = torch.full((self.rows, self.length), NO_TOKEN)
        tokens[row[:count], column[:count] + 1] = ids[:count]  # column c is the label of position c - 1
        return Planted(tokens=tokens, missing=missing, end_of_document=self.end_of_document, has_gaps=self.has_gaps)

    def _missing(self, step: int, *, steps: int, has_empty_half: bool) -> torch.Tensor:
        """Positions without a label. Ranks and micro-batches must have different token counts, some of them zero."""
        missing = torch.zeros(self.rows, self.length, dtype=torch.bool)
        edges = self._sequence_edges()
        for row in range(self.rows):
            missing[row, _edge_positions((row + step) % EDGE_KINDS, edges, self.length)] = True
        missing[0, : self.length // 2] = True
        if self.is_paired and step == 0:
            missing[self.rows // 4 * 2 + 2 :][: self._spare_rows()] = True  # not a whole rank, nor a micro-batch
        if has_empty_half and step == 1:
            missing[: self.rows // 2] = True
        if step == steps - 1:
            missing[-max(1, self.rows // 3) :] = True
        return missing if step > 0 else self._with_an_odd_count(missing)

    def _with_an_odd_count(self, missing: torch.Tensor) -> torch.Tensor:
        """Remove a few labels of the last row, so that 1 / count is far from any bfloat16 number: otherwise a scale
        rounded to the gradients' dtype could be right by luck."""
        count, most = int((~missing).sum()), min(int((~missing[-1]).sum()) - 1, self.length // 2)
        fewer = max(range(max(1, min(most, count - 1))), key=lambda fewer: _rounding_of_scale(count - fewer))
        places = (~missing[-1]).nonzero().squeeze(1)
        missing[-1, places[len(places) - fewer :]] = True
        return missing

    def _spare_rows(self) -> int:
        """Rows that lose all labels, so that 1 / (number of pairs) is far from any bfloat16 number, as above."""
        pairs = self.rows // 2
        return 2 * max(range(max(1, pairs // 2)), key=lambda fewer: _rounding_of_scale(pairs - fewer))

    def _sequence_edges(self) -> list[int]:
        """First positions of sequence shards, for every degree that divides both the ranks and the length."""
        degrees = [
            count for count in range(2, self.num_ranks + 1) if self.num_ranks % count == self.length % count == 0
        ]
        return sorted({self.length // degree * place for degree in degrees for place in range(1, degree)})


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One global batch: tokens to write (NO_TOKEN: none) and positions whose label is removed."""

    tokens: torch.Tensor
    missing: torch.Tensor
    end_of_document: int | None
    has_gaps: bool = False

    def into(self, batch: Batch, *, first_row: int) -> Batch:
        """Plant into one rank's rows; its first row is row `first_row` of the global batch."""
        count = batch["labels"].shape[0]
        inputs, labels = batch["input_ids"].clone(), batch["labels"].clone()
        tokens, missing = (rows[first_row : first_row + count] for rows in (self.tokens, self.missing))
        is_put = tokens != NO_TOKEN
        if self.end_of_document is not None:  # the loader's documents stay where they are
            is_put = is_put & (inputs != self.end_of_document)
        inputs[is_put] = tokens[is_put]
        follows = is_put[:, 1:] & ((labels[:, :-1] != IGNORED) | self.has_gaps)
        labels[:, :-1][follows] = tokens[:, 1:][follows]
        made = {**batch, "input_ids": inputs, "labels": labels}
        own_row = self.tokens.shape[0] // 2 - first_row
        if self.end_of_document is not None and 0 <= own_row < count:
            _end_documents(made, own_row, self.end_of_document)
        labels[missing] = IGNORED
        return made


def _end_documents(batch: Batch, row: int, end_of_document: int) -> None:
    """End documents in the first, the middle and the last column of a row."""
    inputs, labels = batch["input_ids"][row], batch["labels"][row]
    columns = sorted({0, len(inputs) // 2, len(inputs) - 1})
    for column in columns:
        inputs[column] = end_of_document
        if column > 0 and labels[column - 1] != IGNORED:
            labels[column - 1] = end_of_document
    labels[inputs == end_of_document] = IGNORED
    positions, since = batch["position_ids"].clone(), 0
    for column, token in enumerate(inputs.tolist()):
        positions[row, column] = since
        since = 0 if token == end_of_document else since + 1
    batch["position_ids"] = positions


def check_reach(borders: Borders, plan: Plan, batches: Sequence[Tensors], evaluation: Sequence[Tensors]) -> Check:
    """Check that training covered every slice end of the plan, as input and as counted label, where there is room. The
    detail adds the number of rows that the held-out batches covered."""
    inputs, labels = _ids(batches, "input_ids"), _ids(batches, "labels") - {IGNORED}
    ends = plan_ends(plan, borders.vocab_size)
    missed = sorted(ends - (inputs & labels))
    room = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches) // 4
    if missed and room >= len(borders.ends):
        expected = f"tokens at all {len(ends)} ends of vocabulary slices, as inputs and as labels"
        return Check.failed("reach", Finding(rule=9, expected=expected, found=f"none of {missed[:4]}"))
    rows = (inputs | _ids(evaluation, "input_ids")) & (labels | _ids(evaluation, "labels"))
    reached = f"{len(rows)} of {borders.vocab_size} vocabulary rows as inputs and as labels"
    return Check.passed("reach", f"{reached}, {len(ends) - len(missed)} of {len(ends)} ends of slices trained on")


def _ids(batches: Sequence[Tensors], key: str) -> set[int]:
    return {token for batch in batches for token in batch[key].flatten().tolist()}


def _edge_positions(kind: int, edges: Sequence[int], length: int) -> list[int]:
    return {1: [0], 2: [length - 1], 3: [edge - 1 for edge in edges], 4: list(edges)}.get(kind, [])


def _rounding_of_scale(count: int) -> float:
    """Relative rounding error of 1 / `count` in bfloat16."""
    scale = torch.tensor(1.0 / max(1, count), dtype=torch.float64)
    return abs(float(scale.bfloat16()) - float(scale)) / float(scale)


def _chunks(size: int, degree: int) -> Iterator[tuple[int, int]]:
    """(begin, size) of the non-empty chunks of ceil(size / degree) rows."""
    chunk = -(-size // degree)
    return ((begin, min(chunk, size - begin)) for begin in range(0, size, chunk or 1))
