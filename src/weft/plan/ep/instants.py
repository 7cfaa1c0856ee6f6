"""Instants of a step with expert parallelism and ZeRO: a block D and its experts X are two units of `fully_shard`.

For a block after `done` finished ones, with the temporaries of `rows.py`:

    forward   of the last experts: everything saved, X gathered with its all-gather output, rows of the dispatcher
    head      of the forward: the all-gather output of the last X is held until the forward ends
    gather    of X for its backward: all-gather output and copy, activations not yet recomputed
    recompute the forward of the experts, again: the block's activations, rows of the dispatcher
    backward  of the experts: gradients of the gate's operands and of the last matrix
    reduction gradients of X and its reduce-scatter input, which is copied from them
    end       backward of the norm before them: X is reduced, its activations are freed
    attention with materialised scores: three tensors of their size

Gathered are, beside the root: ZeRO-3 D and inside the experts X, with the all-gather output of the next D; ZeRO-1 and 2
all units that are not finished. The reduce-scatter input of the unit before is held: D's in the experts, then X's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weft.plan.columns import Bools, Floats
from weft.plan.ep.rows import Rows, rows_of
from weft.plan.memory.block_activations import saved_by_default
from weft.plan.memory.instant import TermParts, Terms, gradients_of_earlier, held_gathered, instant
from weft.plan.memory.parameters import Elements, expert_elements
from weft.plan.memory.timeline import head_gradient
from weft.plan.view import View

SCORE_GRADIENTS = 3  # of the probabilities, of the scores, and the probabilities themselves
NORM_FLOAT32_STREAMS = 5  # of a norm's backward, written out in float32
BLOCK = "block"  # in the names of the instants that these replace


def with_experts(parts: TermParts, instants: dict[str, Terms]) -> dict[str, Terms]:
    """`instants`, with those of blocks replaced for plans whose experts are units of their own."""
    columns = parts.view.columns
    is_here = (columns.ep > 1) & (columns.zero > 0)
    if not np.any(is_here):
        return instants
    own = Units.of(parts).instants()
    kept = {name: _only(terms, ~is_here) if BLOCK in name else terms for name, terms in instants.items()}
    return kept | {name: _only(terms, is_here) for name, terms in own.items()}


def _only(terms: Terms, is_here: Bools) -> Terms:
    return {term: np.where(is_here, values, 0.0) for term, values in terms.items()}


def _scores(view: View) -> tuple[Floats, Floats]:
    """Bytes of one tensor of scores, and of those that attention saves; 0 with a fused kernel."""
    one, saved = np.zeros(len(view.columns)), np.zeros(len(view.columns))
    c = view.sizes.activation
    pairs = view.tokens * view.request.workload.sequence_length / view.columns.tp
    for block in view.shape.kinds:
        attention = block.attention
        if attention is None or not view.request.writes_scores(attention):
            continue
        kept = saved_by_default(block, compute_bytes=c, writes_scores=True, hidden_size=view.shape.hidden_size)
        one = np.maximum(one, pairs * attention.num_heads * c)
        saved = np.maximum(saved, pairs * kept.scores)
    return one, saved


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of the largest block with experts."""

    parts: TermParts
    dense: Elements
    experts: Elements
    last_matrix: Floats  # elements of the experts' last matrices
    num_blocks: Floats  # with experts, on the rank
    rows: Rows
    scores: Floats  # bytes of one tensor of attention's scores
    saved_scores: Floats

    @staticmethod
    def of(parts: TermParts) -> Units:
        view = parts.view
        found: tuple[Floats, Elements, Elements] | None = None
        count = np.zeros(len(view.columns))
        smallest = np.zeros(len(view.columns))
        for index, kind in enumerate(view.shape.kinds):
            if kind.moe is None:
                continue
            experts, block = expert_elements(kind, view.columns), view.share.blocks[index]
            count = count + view.stage.blocks[:, index]
            matrices = [linear.num_parameters for linear in kind.linears if linear.role == "expert"]
            last = experts.unsharded * min(matrices) / max(sum(matrices), 1)
            if found is None or np.any(block.unsharded > found[0]):
                found, smallest = (block.unsharded, block, experts), last
        if found is None:
            raise ValueError("expert parallelism without experts")
        _, block, experts = found
        dense = replace(block + experts.times(-1.0), inner=block.inner)
        scores, saved_scores = _scores(view)
        return Units(
            parts=parts, dense=dense, experts=experts, last_matrix=smallest, num_blocks=count, rows=rows_of(view),
            scores=scores, saved_scores=saved_scores,
        )  # fmt: skip

    @property
    def view(self) -> View:
        return self.parts.view

    def instants(self) -> dict[str, Terms]:
        last = np.maximum(self.num_blocks - 1, 0)
        moments = {"last": 0 * last, "last but one": np.minimum(1.0, last), "second": np.maximum(last - 1, 0)}
        moments["first"] = last
        recomputed = self.parts.blocks.recomputed
        if np.any(recomputed.is_mixed):
            moments["last recomputed"] = np.minimum(recomputed.above_last("full"), last)
            moments["last selectively recomputed"] = np.minimum(recomputed.above_last("selective"), last)
        found = {"forward of the last experts": self._forward(), "forward of the head": self._head()}
        for place, done in moments.items():
            found |= {f"{name} of the {place} experts": terms for name, terms in self._backward(done).items()}
        return found

    def _forward(self) -> Terms:
        parts, view = self.parts, self.view
        gathered = np.where(self._is_zero3, self._root + self._unit_bytes, held_gathered(view))
        none = np.zeros(len(view.columns))
        # a recomputed block saves nothing yet: tensors inside experts exist one after the other
        passing = np.minimum(parts.blocks.restored(none), self.rows.saved)
        inside = np.where(parts.blocks.is_recomputed(none), passing, self.rows.forward)
        return instant(
            parts,
            saved=parts.saved_at_loss,
            gathered=gathered,
            gradients=parts.earlier_gradients,
            buffers=none,
            temporaries=self._arrived + inside + 2 * view.stream_bytes,
        )

    def _head(self) -> Terms:
        parts = self.parts
        return instant(
            parts,
            saved=parts.saved_at_loss + parts.final,
            gathered=np.where(self._is_zero3, self._root, held_gathered(self.view)),
            gradients=parts.earlier_gradients,
            buffers=np.zeros(len(self.view.columns)),
            temporaries=self._arrived,
            logits=parts.num_logits * self.view.sizes.activation + parts.held_logits,
        )

    def _backward(self, done: Floats) -> dict[str, Terms]:
        sizes, parts = self.view.sizes, self.parts
        inside = np.where(self._is_zero3, self._root + self._unit_bytes, self._unfinished(done))
        outside = inside - self.experts.padded * sizes.compute
        before = np.where(done > 0, self.dense.padded * sizes.communication, 0.0)
        left = np.maximum(parts.saved - parts.blocks.freed(done), 0.0)
        whole = left + parts.blocks.restored(done)
        gradients = self._gradients(done)
        reduced = self.experts.padded * sizes.communication
        base = self._waiting() + self._next_gathered(done)
        copied = np.where(self._is_zero3, self.experts.padded * sizes.compute, 0.0)
        of_experts = self.experts.unsharded * sizes.compute
        norm = self.view.stream_bytes * (1 + NORM_FLOAT32_STREAMS * 4 / sizes.activation)
        without = np.maximum(whole - self.rows.saved, 0.0)
        # output and normalised input of the norm are freed first; recompute holds the block's input elsewhere
        freed = self.view.stream_bytes * np.where(parts.blocks.is_recomputed(done), 2, 3)
        return {
            "gather": self._at(left, inside, gradients, before, self._waiting() + copied),
            "recompute": self._at(
                np.where(parts.blocks.is_recomputed(done), whole, 0.0), inside, gradients, before,
                base + self.rows.forward + self.rows.gradient + 2 * self.view.stream_bytes,
            ),
            "backward": self._at(
                whole, inside, gradients, before, base + self.rows.backward + self.last_matrix * sizes.compute
            ),
            "reduction": self._at(without, outside, gradients, before + reduced, base + of_experts),
            "attention": self._at(
                np.where(self.scores > 0, np.maximum(without - freed - self.saved_scores, 0.0), 0.0), outside,
                gradients + self._new_gradient, reduced, base + SCORE_GRADIENTS * self.scores,
            ),
            "end": self._at(without - freed, outside, gradients + self._new_gradient, reduced, base + norm),
        }  # fmt: skip

    def _at(self, saved: Floats, gathered: Floats, gradients: Floats, buffers: Floats, temporaries: Floats) -> Terms:
        return instant(
            self.parts, saved=saved, gathered=np.maximum(gathered, 0.0), gradients=gradients, buffers=buffers,
            temporaries=temporaries, logits=self.parts.held_logits,
        )  # fmt: skip

    @cached_property
    def _is_zero3(self) -> Bools:
        return np.asarray(self.view.columns.zero == 3, dtype=bool)

    @property
    def _arrived(self) -> Floats:
        """The all-gather output of the last experts in the forward; ZeRO-1 and 2 gather in the first one alone."""
        gathers = self._is_zero3 | ~self.parts.has_gradients
        return np.where(gathers, self.experts.padded * self.view.sizes.compute, 0.0)

    @property
    def _root(self) -> Floats:
        return self.view.share.root.padded * self.view.sizes.compute

    @property
    def _unit_bytes(self) -> Floats:
        return self.view.gathered_bytes(root=self.experts.padded, blocks=self.dense.padded)

    def _unfinished(self, done: Floats) -> Floats:
        return held_gathered(self.view) - done * self._unit_bytes

    @property
    def _new_gradient(self) -> Floats:
        """The shard of the experts' gradient, unless it is added to that of earlier micro-batches."""
        is_new = ~self.parts.has_gradients | (self.view.columns.zero == 1)
        return np.where(is_new, self.experts.shard * self.view.sizes.gradient, 0.0)

    def _gradients(self, done: Floats) -> Floats:
        """Shards of finished blocks; ZeRO-1 holds those of earlier micro-batches unsharded until it reduces them."""
        sizes, view = self.view.sizes, self.view
        shards = done * (self.dense.shard + self.experts.shard) * sizes.gradient
        unsharded = done * (self.dense.unsharded + self.experts.unsharded) * sizes.communication
        earlier = gradients_of_earlier(view)
        several = np.where(view.columns.zero == 1, earlier - unsharded + shards, earlier)
        return np.where(self.parts.has_gradients, several, shards)

    def _waiting(self) -> Floats:
        """Gradients of the head and of the stream."""
        return head_gradient(self.view) + self.view.stream_bytes

    def _next_gathered(self, done: Floats) -> Floats:
        """ZeRO-3's all-gather output of the next block, which is prefetched."""
        is_last = done >= self.parts.num_blocks - 1
        return np.where(self._is_zero3 & ~is_last, self.dense.padded * self.view.block_bytes, 0.0)
