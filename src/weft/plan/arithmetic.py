"""The arithmetic of one plan, line by line, formula and number, so that it can be checked by hand and learnt from.

The lines of a term add up to that term of the estimate; nothing is computed twice in two ways that could differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.plan import Plan
from weft.core.terms import MemoryTerm as Term
from weft.plan.columns import columns_of
from weft.plan.estimate import Estimate, estimate
from weft.plan.memory.block_activations import bytes_of, kept_by, kept_compiled, kept_fully, kept_selectively
from weft.plan.memory.fused_loss import num_stretches
from weft.plan.memory.peak import COMMUNICATOR_BYTES, FRAGMENTATION, LOSS_BYTES
from weft.plan.pp.stages import PLACES
from weft.plan.request import Request, byte_sizes
from weft.plan.view import View, is_compiled, view_at

GB = 1e9
SAYS = {"none": "kept", "selective": "computed again selectively", "full": "computed again"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One step of the arithmetic."""

    term: str
    formula: str
    bytes: float


@dataclass(frozen=True, kw_only=True)
class StagesTable:
    """Bytes of weights, gradients and optimizer states a device, stage by stage, as textbooks count them."""

    parameters: int
    shards: int
    weight_bytes: float  # a parameter
    gradient_bytes: float
    state_bytes: float  # a parameter: moments, and the float32 master where there is one beside the weights

    def stage_bytes(self, zero: int) -> float:
        divided = {
            0: 0.0,
            1: self.state_bytes,
            2: self.state_bytes + self.gradient_bytes,
            3: self.state_bytes + self.gradient_bytes + self.weight_bytes,
        }[zero]
        whole = self.weight_bytes + self.gradient_bytes + self.state_bytes - divided
        return self.parameters * (whole + divided / self.shards)

    def rows(self) -> list[tuple[str, str, float]]:
        """(stage, formula, bytes) for ZeRO 0 to 3."""
        w, g, k = (f"{value:g}" for value in (self.weight_bytes, self.gradient_bytes, self.state_bytes))
        n, p = self.shards, f"{self.parameters / GB:.3g}e9"
        formulas = (
            f"{p} x ({w} + {g} + {k})",
            f"{p} x ({w} + {g} + {k}/{n})",
            f"{p} x ({w} + ({g} + {k})/{n})",
            f"{p} x ({w} + {g} + {k})/{n}",
        )
        names = ("replicated", "ZeRO-1", "ZeRO-2", "ZeRO-3")
        return [(name, formulas[zero], self.stage_bytes(zero)) for zero, name in enumerate(names)]


def textbook_states(request: Request, *, shards: int) -> StagesTable:
    """The classic table for this model, precision and optimizer."""
    sizes = byte_sizes(request)
    gradient = min(sizes.gradient, sizes.compute) if sizes.is_mixed else sizes.gradient
    return StagesTable(
        parameters=request.shape.num_parameters,
        shards=shards,
        weight_bytes=sizes.compute,
        gradient_bytes=gradient,
        state_bytes=sizes.optimizer + (sizes.master if sizes.is_mixed else 0),
    )


def textbook_activations(request: Request, *, tokens: float) -> tuple[float, float]:
    """(without, with checkpointing) of a device, by the count of the ZeRO paper: 12 x hidden numbers a token and layer.

    It stands for fused kernels and no attention scores; what this model's own operators keep is in `explain_memory`.
    """
    shape, c = request.shape, byte_sizes(request).activation
    a_layer = 12.0 * shape.hidden_size * tokens * c
    return a_layer * shape.num_layers, shape.hidden_size * tokens * c * shape.num_layers + a_layer


def explain_memory(request: Request, plan: Plan) -> tuple[Estimate, list[Line]]:
    """The estimate and the lines that lead to it, for the fullest rank."""
    found = estimate(request, plan)
    columns = columns_of([plan])
    place = next((i for i, name in enumerate(PLACES) if found.peak_at.endswith(f"on the {name} stage")), 0)
    view = view_at(request, columns, np.arange(1), place=place)
    lines = [*_states(view, found), *_activations(view, found), *_others(view, found)]
    return found, lines


def _states(view: View, found: Estimate) -> list[Line]:
    sizes, share = view.sizes, view.share.total
    whole, shard = int(share.whole[0]), int(share.shard[0])
    shards, zero = int(view.columns.shards[0]), found.plan.data_parallel.zero
    held, how = (shard, f"{whole:,} parameters / {shards}") if zero else (whole, f"{whole:,} parameters")
    terms = found.memory_terms
    lines = [
        Line(term=Term.WEIGHTS, formula=f"{how} x {sizes.master} B at rest", bytes=terms[Term.WEIGHTS]),
        Line(
            term=Term.OPTIMIZER_STATE,
            formula=f"{how} x {sizes.optimizer:g} B ({view.request.workload.optimizer})",
            bytes=terms[Term.OPTIMIZER_STATE],
        ),
        Line(term=Term.GRADIENTS, formula=_gradients(view, found, held), bytes=terms[Term.GRADIENTS]),
        Line(term=Term.GATHERED, formula=_gathered(view, found), bytes=terms[Term.GATHERED]),
    ]
    kept = terms.get(Term.WEIGHT_VERSIONS, 0)
    if kept:
        versions = 1 + round(kept / (whole * sizes.master))
        formula = f"({versions} - 1) versions x {whole:,} x {sizes.master} B"
        lines.append(Line(term=Term.WEIGHT_VERSIONS, formula=formula, bytes=kept))
    return lines


def _gradients(view: View, found: Estimate, held: int) -> str:
    size = found.memory_terms[Term.GRADIENTS]
    if size == 0:
        return "none yet at this moment: the last step's are freed, this step's come with the backward"
    per = view.sizes.gradient
    if abs(size - held * per) <= 1:
        return f"{held:,} x {per} B"
    return f"as far as the backward has come ({size / per:,.0f} numbers of {per} B)"


def _gathered(view: View, found: Estimate) -> str:
    compute = f"{view.block_bytes[0]:.3g}"
    match found.plan.data_parallel.zero:
        case 0:
            return f"casts to {compute} B that the backward needs" if view.sizes.is_mixed else "nothing is gathered"
        case 3:
            return (
                f"the blocks in use, {int(view.share.largest_padded[0]):,} x {compute} B each, none while the loss runs"
            )
        case _:
            return (
                f"{int(view.share.total.padded[0]):,} x {compute} B, kept from the first forward to the last backward"
            )


def _activations(view: View, found: Estimate) -> list[Line]:
    """A line a kind of block and what becomes of it, and one for what is recomputed or already freed at the peak."""
    columns, c, hidden = view.columns, view.sizes.activation, view.shape.hidden_size
    keys = np.full(1, float(view.request.workload.sequence_length))
    flying = float(view.stage.in_flight[0])
    lines = []
    for index, block in enumerate(view.shape.kinds):
        count = int(view.stage.blocks[0, index])
        if not count:
            continue
        writes_scores = block.attention is not None and view.request.writes_scores(block.attention)
        as_it_is = kept_compiled if is_compiled(view.request, columns)[0] else kept_by
        kept = {
            "none": as_it_is(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=hidden),
            "selective": kept_selectively(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=hidden),
            "full": kept_fully(compute_bytes=c, hidden_size=hidden),
        }
        tokens, again = int(view.tokens[0]), view.stage.again
        full, selective = int(again.full[0, index]), int(again.selective[0, index])
        for policy, blocks in (("none", count - full - selective), ("selective", selective), ("full", full)):
            if not blocks:
                continue
            a_block = float(bytes_of(kept[policy], block, columns, tokens=view.tokens, keys=keys)[0])
            formula = f"{tokens:,} tokens x {a_block / tokens:,.0f} B x {blocks} {block.kind} blocks"
            formula += f" ({SAYS[policy]})" if found.plan.activations.policy == "budget" else ""
            formula += f" x {flying:g} micro-batches in flight" if flying != 1 else ""
            lines.append(Line(term=Term.ACTIVATIONS, formula=formula, bytes=a_block * blocks * flying))
    rest = found.memory_terms[Term.ACTIVATIONS] - sum(line.bytes for line in lines)
    between = ", what passes between stages" if found.plan.mesh.pp > 1 else ""
    what = f"the final norm{between}, and parts computed again" if rest >= 0 else "freed by the backward so far"
    if abs(rest) >= 1:
        lines.append(Line(term=Term.ACTIVATIONS, formula=what, bytes=rest))
    return lines


def _others(view: View, found: Estimate) -> list[Line]:
    terms, device = found.memory_terms, view.request.cluster.device
    logits = _logits(view)
    outside = f"{device.overhead_bytes / 2**20:,.0f} MiB context + {COMMUNICATOR_BYTES / 2**20:.0f} MiB a communicator"
    formulas = {
        Term.LOGITS: logits if terms[Term.LOGITS] else "freed before this moment",
        Term.COMM_BUFFERS: "collectives in flight, receive buffers",
        Term.TEMPORARIES: "operators at the peak, matrix-product workspaces",
        Term.FRAMEWORK: f"{outside} + {FRAGMENTATION:.0%} of what comes and goes",
    }
    return [Line(term=term, formula=formula, bytes=terms[term]) for term, formula in formulas.items()]


def _logits(view: View) -> str:
    is_fused, has_slices = bool(view.columns.fused_loss[0]), int(view.columns.tp[0]) > 1 and view.shape.has_cut_head
    is_cut = has_slices and (is_fused or bool(view.columns.loss_parallel[0]))
    vocab = view.shape.vocab_size / (int(view.columns.tp[0]) if is_cut else 1)
    rows = f"{int(view.tokens[0]):,} tokens x {vocab:,.0f} words"
    if is_fused:
        stretches = int(num_stretches(view)[0])
        piece = " + float32 of a piece" if is_cut else ""
        return f"{rows} x {view.sizes.activation} B{f' / {stretches} stretches' if stretches > 1 else ''}{piece}"
    if is_cut:
        return f"{rows} x {2 * view.sizes.activation} B (logits and their gradient) + float32 of one stretch"
    return f"{rows} x {LOSS_BYTES} B (three float32 copies)"
