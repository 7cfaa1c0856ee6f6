"""Peak memory, term by term, for every plan: the largest instant of a step on the fullest rank.

The terms are those of the instant with the largest sum, so they are disjoint and add up. `timeline.py` has the
instants; this file has their inputs, and the memory outside the allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.model_shape import ModelShape
from weft.core.terms import MemoryTerm as Term
from weft.plan.columns import Floats, Ints
from weft.plan.ep.instants import with_experts
from weft.plan.memory import fused_loss
from weft.plan.memory.feedback import feedback_bytes
from weft.plan.memory.in_flight import LOG_PROBABILITY_BYTES, edge_bytes, flight_of, waiting_bytes
from weft.plan.memory.instant import TermParts, Terms, gradients_of_earlier, has_buckets
from weft.plan.memory.offloaded import Offloaded, delayed_chunks, offloaded_bytes, updates_beside_compute
from weft.plan.memory.saved_activations import saved_blocks
from weft.plan.memory.states import state_bytes
from weft.plan.memory.timeline import MIB, instants_of
from weft.plan.memory.weights import weight_bytes
from weft.plan.teacher import loss_bytes, teacher_bytes
from weft.plan.time.state_stream import held_elements
from weft.plan.view import View

MATMUL_WORKSPACE_BYTES = 64 * MIB  # 32 MiB per thread that runs matmuls, two threads (measured on Hopper)
COMMUNICATOR_BYTES = 400 * MIB  # buffers of a communicator: 0.3 to 0.7 GB are reported; one per axis in use
FRAGMENTATION = 0.02  # share of the memory that is allocated within a step (measured 0 to 4%)
LOSS_CHUNK_ELEMENTS = 2**26  # float32 logits per chunk of loss parallel
LOSS_BYTES = 12  # float32 log-probabilities, their gradient, and the gradient of the logits


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest rank of every plan."""

    terms: Terms
    instant: tuple[str, ...]  # names; `at` has an index into it for each plan
    at: Ints
    place: Ints  # the fullest pipeline rank: index into PLACES
    offloaded: Offloaded

    @property
    def total(self) -> Floats:
        return _total(self.terms)

    @property
    def host(self) -> Floats:
        """Offloaded bytes in the memory of a node: all its ranks."""
        return self.offloaded.host_per_node


def estimate_memory(views: Sequence[View]) -> MemoryEstimate:
    """Peak memory of the fullest rank of each plan."""
    terms, names, at = _estimate_stage(views[0])
    place = np.full(len(at), views[0].place, dtype=np.int64)
    found = MemoryEstimate(terms, names, at, place, offloaded_bytes(views))
    for view in views[1:]:
        other, _, other_at = _estimate_stage(view)
        _keep_fuller(found, view.rows, other, other_at, view.place)
    return found


def _keep_fuller(found: MemoryEstimate, rows: Ints, other: Terms, other_at: Ints, place: int) -> None:
    """Replace these rows of `found` where `other` needs more memory."""
    fuller = _total(other) > found.total[rows]
    chosen = rows[fuller]
    for term, values in found.terms.items():
        values[chosen] = other[term][fuller]
    found.at[chosen] = other_at[fuller]
    found.place[chosen] = place


def _estimate_stage(view: View) -> tuple[Terms, tuple[str, ...], Ints]:
    """(terms at the peak, names of the instants, index of the peak)."""
    parts = _parts(view)
    instants = with_experts(parts, instants_of(parts))
    totals = np.stack([_total(terms) for terms in instants.values()])
    at = np.argmax(totals, axis=0)
    peak = {term: np.choose(at, [terms[term] for terms in instants.values()]) for term in instants["update"]}
    return _with_framework(view, peak), tuple(instants), at


def _parts(view: View) -> TermParts:
    shape, stage = view.shape, view.stage
    blocks = saved_blocks(view)
    one = blocks.total
    is_sharded = (view.columns.loss_parallel > 0) & (view.columns.tp > 1) & shape.has_sharded_head
    vocab = np.ceil(shape.num_logits / np.where(is_sharded, view.columns.tp, 1))
    numbers = np.where(stage.holds_head, view.tokens * vocab, 0.0)
    # loss parallel: the logits, their gradient, and one chunk: its softmax in float32, and its logits cast to float32
    chunk_bytes = 4 if view.sizes.activation == 4 else 8
    sharded_bytes = numbers * 2 * view.sizes.activation + chunk_bytes * np.minimum(numbers, LOSS_CHUNK_ELEMENTS)
    logits = np.where(is_sharded, sharded_bytes, numbers * loss_bytes(view, LOSS_BYTES))
    # input and output of the final norm are held until the head's backward
    final_bytes = 4 + view.sizes.residual + view.sizes.activation
    final = np.where(stage.holds_head, view.tokens * shape.hidden_size * final_bytes, 0.0)
    if shape.caps_logits:  # the tanh is saved too
        logits = logits + numbers * view.sizes.activation
    is_fused = (view.columns.fused_loss > 0) & stage.holds_head
    logits = np.where(is_fused, fused_loss.loss_bytes(view), logits)
    ready = np.where(is_fused, fused_loss.gradient_bytes(view), 0.0)
    final = final + ready
    earlier = gradients_of_earlier(view)
    held_loss = np.where(is_fused, ready, numbers * LOG_PROBABILITY_BYTES)
    flight = flight_of(view, one_bytes=one, loss_bytes=held_loss, gradient_bytes=earlier)
    others = np.maximum(flight.on_last_stage - 1, 0.0)
    saved = one * flight.microbatches + edge_bytes(view, flight) + waiting_bytes(view) + others * final
    saved = saved + blocks.arrived + blocks.tensors_here
    elsewhere = one * (stage.in_flight - stage.at_loss)
    saved_logit_bytes = np.where(is_sharded, view.sizes.activation, LOG_PROBABILITY_BYTES)
    held = numbers * (others * saved_logit_bytes + stage.waiting * view.sizes.activation)
    held = np.where(is_fused, 0.0, held)  # gradients of the head and its input are in `final`
    return TermParts(
        view=view,
        rest=_resident(view),
        saved=saved,
        saved_at_loss=saved - elsewhere,
        final=final,
        blocks=blocks,
        logits=logits + held,
        held_logits=held,
        num_logits=np.where(is_fused, 0.0, numbers),
        earlier_gradients=np.where(flight.has_gradients | has_buckets(view), earlier, 0.0),
        has_gradients=flight.has_gradients,
        num_blocks=stage.blocks.sum(axis=1),
        widest=_widest(shape),
        delayed_gradients=_delayed_gradients(view),
        delayed_chunks=delayed_chunks(view),
    )


def _resident(view: View) -> Terms:
    """Weights, optimizer state and older weight versions, which exist throughout the run."""
    columns, stage, sizes = view.columns, view.stage, view.sizes
    trained = held_elements(view)
    on_device = columns.offload_parameters == 0
    # with vertical sync every stage keeps as many versions as the first
    versions = np.where((columns.vertical_sync > 0) & (columns.pp > 1), columns.pp, stage.versions)
    return {
        Term.WEIGHTS: np.where(on_device, weight_bytes(view), 0.0) + teacher_bytes(view),
        Term.OPTIMIZER_STATE: np.where(columns.offload_optimizer > 0, 0.0, state_bytes(view, trained))
        + feedback_bytes(view),
        Term.WEIGHT_VERSIONS: (versions - 1) * view.trained.total.unsharded * sizes.master,
    }


def _delayed_gradients(view: View) -> Floats:
    """Gradients of the step before, if its update is delayed and runs on the device."""
    return np.where(updates_beside_compute(view), held_elements(view) * view.sizes.gradient, 0.0)


def _widest(shape: ModelShape) -> int:
    """Largest MLP width, or total width of the experts of a token."""
    widths = [max(kind.mlp_width, kind.moe.top_k * kind.moe.expert_width if kind.moe else 0) for kind in shape.kinds]
    return max(widths, default=0)


def _with_framework(view: View, terms: Terms) -> Terms:
    """`terms` with matmul workspaces and the memory outside the allocator; a CPU has neither."""
    request, columns = view.request, view.columns
    if request.is_cpu:
        return {**terms, Term.FRAMEWORK: np.zeros(len(columns))}
    comes_and_goes = sum(
        (terms[term] for term in (Term.ACTIVATIONS, Term.GATHERED, Term.COMM_BUFFERS, Term.TEMPORARIES, Term.LOGITS)),
        start=np.zeros(len(columns)),
    )
    axes = sum(
        ((getattr(columns, axis) > 1).astype(float) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")),
        start=(columns.secondary_shard > 0).astype(float) + ((columns.head_ranks > 1) & (columns.key_ranks > 1)),
    )
    outside = request.cluster.device.overhead_bytes + axes * COMMUNICATOR_BYTES + FRAGMENTATION * comes_and_goes
    return {**terms, Term.TEMPORARIES: terms[Term.TEMPORARIES] + MATMUL_WORKSPACE_BYTES, Term.FRAMEWORK: outside}


def _total(terms: Terms) -> Floats:
    values = list(terms.values())
    return np.asarray(sum(values[1:], start=values[0]), dtype=np.float64)
