"""The arithmetic of one plan as lines of formula and bytes, to be checked by hand.

The lines of a term add up to that term of the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.plan import Plan
from weft.core.terms import MemoryTerm as Term
from weft.plan.estimate import Estimate, estimate
from weft.plan.memory.block_activations import (
    bytes_of,
    saved_by_compiled,
    saved_by_default,
    saved_by_full,
    saved_by_selective,
)
from weft.plan.memory.fused_loss import num_chunks
from weft.plan.memory.peak import COMMUNICATOR_BYTES, FRAGMENTATION, LOSS_BYTES
from weft.plan.memory.saved_activations import INPUTS_ON_DEVICE
from weft.plan.plan_rows import columns_of
from weft.plan.pp.stages import PLACES
from weft.plan.request import Request, byte_sizes
from weft.plan.time.state_stream import rest_bytes, rests_in_compute
from weft.plan.view import View, is_compiled, view_at

GB = 1e9
EVEN_SHARDS = 0.001  # padding that a quotient of parameters may leave out, as a share of them
POLICY_WORDS = {"none": "saved", "selective": "recomputed selectively", "full": "recomputed"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One step of the arithmetic."""

    term: str
    formula: str
    bytes: float


@dataclass(frozen=True, kw_only=True)
class StagesTable:
    """Bytes of weights, gradients and optimizer states per device and ZeRO stage, as textbooks count them."""

    parameters: int
    shards: int
    weight_bytes: float  # per parameter
    gradient_bytes: float
    state_bytes: float  # per parameter: moments, and the float32 master weight if there is one

    def stage_bytes(self, zero: int) -> float:
        divided = {
            0: 0.0,
            1: self.state_bytes,
            2: self.state_bytes + self.gradient_bytes,
            3: self.state_bytes + self.gradient_bytes + self.weight_bytes,
        }[zero]
        replicated = self.weight_bytes + self.gradient_bytes + self.state_bytes - divided
        return self.parameters * (replicated + divided / self.shards)

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
    """Bytes per device (without, with checkpointing) by the ZeRO paper: 12 x hidden elements per token and layer.

    This assumes fused kernels and no attention scores; `explain_memory` counts the operators of this model.
    """
    shape, c = request.shape, byte_sizes(request).activation
    per_layer = 12.0 * shape.hidden_size * tokens * c
    return per_layer * shape.num_layers, shape.hidden_size * tokens * c * shape.num_layers + per_layer


def explain_memory(request: Request, plan: Plan) -> tuple[Estimate, list[Line]]:
    """The estimate and its lines, for the fullest rank."""
    found = estimate(request, plan)
    columns = columns_of([plan])
    place = next((i for i, name in enumerate(PLACES) if found.peak_at.endswith(f"on the {name} stage")), 0)
    view = view_at(request, columns, np.arange(1), place=place)
    lines = [*_states(view, found), *_activations(view, found), *_others(view, found)]
    return found, lines


def _states(view: View, found: Estimate) -> list[Line]:
    sizes, share = view.sizes, view.share.total
    unsharded, shard = int(share.unsharded[0]), int(share.shard[0])
    held, how = (
        (shard, _shard(view, unsharded, shard)) if found.plan.data_parallel.zero else (unsharded, _whole(unsharded))
    )
    terms = found.memory_terms
    lines = [
        Line(term=Term.WEIGHTS, formula=_weights(view, found, how), bytes=terms[Term.WEIGHTS]),
        Line(term=Term.OPTIMIZER_STATE, formula=_moments(view, found, how), bytes=terms[Term.OPTIMIZER_STATE]),
        Line(term=Term.GRADIENTS, formula=_gradients(view, found, held), bytes=terms[Term.GRADIENTS]),
        Line(term=Term.GATHERED, formula=_gathered(view, found), bytes=terms[Term.GATHERED]),
    ]
    older = terms.get(Term.WEIGHT_VERSIONS, 0)
    if older:
        versions = 1 + round(older / (unsharded * sizes.master))
        formula = f"({versions} - 1) versions x {unsharded:,} x {sizes.master} B"
        lines.append(Line(term=Term.WEIGHT_VERSIONS, formula=formula, bytes=older))
    return lines


def _weights(view: View, found: Estimate, how: str) -> str:
    if found.plan.offload.parameters != "none":
        return "on the host"
    if view.shape.has_low_base:
        sizes = " or ".join(f"{size:g} B" for size in (*view.shape.code_sizes, view.sizes.compute))
        return f"{how}: {rest_bytes(view)[0]:g} B at rest of trained ones, {sizes} of frozen ones"
    return f"{how} x {rest_bytes(view)[0]:g} B at rest"


def _moments(view: View, found: Estimate, how: str) -> str:
    if found.plan.offload.optimizer == "none":
        return f"{how} x {view.sizes.optimizer:g} B ({view.request.workload.optimizer})"
    return f"on {found.plan.offload.optimizer}"


def _whole(unsharded: int) -> str:
    return f"{unsharded:,} parameters"


def _shard(view: View, unsharded: int, shard: int) -> str:
    """The quotient where it is the shard; else the shard: rows that do not divide make the first rank's larger."""
    shards = int(view.columns.shards[0])
    if shard * shards - unsharded <= EVEN_SHARDS * unsharded and np.all(view.columns.ep == 1):
        return f"{_whole(unsharded)} / {shards}"
    return f"{shard:,} of {_whole(unsharded)}, the largest of {shards} shards"


def _gradients(view: View, found: Estimate, held: int) -> str:
    size = found.memory_terms[Term.GRADIENTS]
    if size == 0:
        return "none at this instant: freed after the last update, not yet computed in this step"
    per = view.sizes.gradient
    if abs(size - held * per) <= 1:
        return f"{held:,} x {per} B"
    return f"{size / per:,.0f} x {per} B that the backward has computed so far"


def _gathered(view: View, found: Estimate) -> str:
    compute = f"{view.block_bytes[0]:.3g}"
    match found.plan.data_parallel.zero:
        case 0:
            if found.plan.offload.parameters != "none":
                return f"the blocks in use, {int(view.share.largest_padded[0]):,} x {compute} B each, from the host"
            is_cast = view.sizes.is_mixed and not rests_in_compute(view)[0]
            return f"casts to {compute} B that the backward needs" if is_cast else "nothing is gathered"
        case 3:
            return (
                f"the blocks in use, {int(view.share.largest_padded[0]):,} x {compute} B each, none while the loss runs"
            )
        case _:
            return (
                f"{int(view.share.total.padded[0]):,} x {compute} B, held from the first forward to the last backward"
            )


def _activations(view: View, found: Estimate) -> list[Line]:
    """One line per kind of block and recompute policy, and one for bytes recomputed or already freed at the peak."""
    columns, c, hidden = view.columns, view.sizes.activation, view.shape.hidden_size
    keys = np.full(1, float(view.request.workload.sequence_length))
    lines: list[Line] = []
    for index, block in enumerate(view.shape.kinds):
        flying = float(view.stage.in_flight[0])
        count = int(view.stage.blocks[0, index])
        if not count:
            continue
        writes_scores = block.attention is not None and view.request.writes_scores(block.attention)
        as_it_is = saved_by_compiled if is_compiled(view.request, columns)[0] else saved_by_default
        saved = {
            "none": as_it_is(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=hidden),
            "selective": saved_by_selective(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=hidden),
            "full": saved_by_full(compute_bytes=c, hidden_size=hidden),
        }
        tokens, recomputed = int(view.tokens[0]), view.stage.recomputed
        full, selective = int(recomputed.full[0, index]), int(recomputed.selective[0, index])
        for policy, blocks in (("none", count - full - selective), ("selective", selective), ("full", full)):
            if not blocks:
                continue
            per_block = float(bytes_of(saved[policy], block, columns, tokens=view.tokens, keys=keys)[0])
            if policy == "full":
                per_block, blocks, flying = _inputs(view, per_block, blocks, flying)
            formula = f"{tokens:,} tokens x {per_block / tokens:,.0f} B x {blocks} {block.kind} blocks"
            formula += f" ({POLICY_WORDS[policy]})" if found.plan.activations.policy == "budget" else ""
            formula += f" x {flying:g} micro-batches in flight" if flying != 1 else ""
            lines.append(Line(term=Term.ACTIVATIONS, formula=formula, bytes=per_block * blocks * flying))
    rest = found.memory_terms[Term.ACTIVATIONS] - sum(line.bytes for line in lines)
    between = ", activations between stages" if found.plan.mesh.pp > 1 else ""
    what = f"the final norm{between}, and recomputed activations" if rest >= 0 else "freed by the backward so far"
    if abs(rest) >= 1:
        lines.append(Line(term=Term.ACTIVATIONS, formula=what, bytes=rest))
    return lines


def _inputs(view: View, per_block: float, blocks: int, flying: float) -> tuple[float, int, float]:
    """(bytes per block, blocks, micro-batches) of recomputed blocks on the device: partitioned or away, if so asked."""
    columns = view.columns
    share = float(columns.tp[0]) if columns.partition_inputs[0] else 1.0
    if columns.offload_activations[0]:
        return per_block / share, min(blocks, INPUTS_ON_DEVICE), 1.0
    return per_block / share, blocks, flying


def _others(view: View, found: Estimate) -> list[Line]:
    terms, device = found.memory_terms, view.request.cluster.device
    logits = _logits(view)
    outside = (
        f"{device.overhead_bytes / 2**20:,.0f} MiB context + {COMMUNICATOR_BYTES / 2**20:.0f} MiB per communicator"
    )
    formulas = {
        Term.LOGITS: logits if terms[Term.LOGITS] else "freed before this instant",
        Term.COMM_BUFFERS: "collectives in flight, receive buffers",
        Term.TEMPORARIES: "operators at the peak, matmul workspaces",
        Term.FRAMEWORK: f"{outside} + {FRAGMENTATION:.0%} of memory allocated within the step",
    }
    return [Line(term=term, formula=formula, bytes=terms[term]) for term, formula in formulas.items()]


def _logits(view: View) -> str:
    is_fused, has_slices = bool(view.columns.fused_loss[0]), int(view.columns.tp[0]) > 1 and view.shape.has_sharded_head
    is_sharded = has_slices and (is_fused or bool(view.columns.loss_parallel[0]))
    vocab = view.shape.num_logits / (int(view.columns.tp[0]) if is_sharded else 1)
    rows = f"{int(view.tokens[0]):,} tokens x {vocab:,.0f} words"
    if is_fused:
        chunks = int(num_chunks(view)[0])
        float32 = " + part of it in float32" if is_sharded else ""
        return f"{rows} x {view.sizes.activation} B{f' / {chunks} chunks' if chunks > 1 else ''}{float32}"
    if is_sharded:
        return f"{rows} x {2 * view.sizes.activation} B (logits and their gradient) + float32 of one chunk"
    return f"{rows} x {LOSS_BYTES} B (three float32 copies)"
