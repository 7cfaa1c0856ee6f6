"""Seconds per step, term by term, for every plan: compute, exposed communication, the bubble, the update.

micro-batches = compute + tensor, context and expert communication + all-gathers and reduce-scatters that compute does
                not hide
step          = micro-batches of the slowest stage / (1 - bubble) + exposed gradient reduction after the last backward
                + update
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.core import axes
from weft.core.terms import StepTerm as Term
from weft.plan import muon
from weft.plan.columns import Columns, Floats, Ints
from weft.plan.dp.all_reduce import replica_seconds
from weft.plan.pp.stages import bubble_of
from weft.plan.request import Request, rate_format
from weft.plan.teacher import teacher_seconds
from weft.plan.time.compute import ATTENTION_BACKWARD, BlockSeconds, block_seconds, model_flops
from weft.plan.time.links import AxisLink, axis_link, backward_link, context_links, expert_link, link_of, node_links
from weft.plan.time.state_stream import UPDATE_PASSES, held_elements
from weft.plan.time.transfers import OVERLAP, transfers_of
from weft.plan.traffic import Traffic, estimate_traffic
from weft.plan.view import View, busiest_view

EXPOSED_SENDS = 0.1  # a stage sends while it computes the next micro-batch
CONTENTION = 0.1  # share of hidden communication that slows down the compute beside it

Terms = dict[Term, Floats]


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds per step of every plan."""

    terms: Terms
    mfu: Floats
    tokens_per_s: Floats

    @property
    def total(self) -> Floats:
        return _total(self.terms)


def estimate_time(views: Sequence[View]) -> TimeEstimate:
    """Step time of every plan, by its slowest stage."""
    request, columns = views[0].request, views[0].columns
    terms = _stage_terms(views[0])
    busiest = busiest_view(request, columns)
    for view in [*views[1:], *([busiest] if busiest is not None else [])]:
        _keep_slower(terms, view.rows, _stage_terms(view))
    once = terms[Term.DP_COMM] + terms[Term.OPTIMIZER] + terms[Term.OFFLOAD]
    share = bubble_of(columns)
    terms[Term.BUBBLE] = (_total(terms) - once) * share / np.maximum(1 - share, 1e-9)
    step_s = _total(terms)
    peak = _peak_flops(request) * request.cluster.num_devices
    return TimeEstimate(terms, model_flops(request) / (step_s * peak), request.workload.tokens / step_s)


def _stage_terms(view: View) -> Terms:
    """All terms but the bubble, for the rank of `view`."""
    request, columns = view.request, view.columns
    m = columns.microbatches.astype(np.float64)
    busy = block_seconds(view)
    traffic = estimate_traffic(view)
    wire = _wire(request, columns, traffic)
    attention = (1 + ATTENTION_BACKWARD) * m * busy.attention_forward
    return {
        Term.MATMUL: 3 * m * (busy.matmul_forward + busy.head_forward),
        Term.ATTENTION: attention,
        Term.POINTWISE: 3 * m * busy.pointwise_forward,
        Term.FLOAT8_CASTS: m * (busy.quantise_forward + busy.quantise_backward),
        Term.RECOMPUTE: m * busy.recompute,
        Term.LOSS: m * busy.loss,
        Term.TEACHER: teacher_seconds(view),
        Term.LAUNCH: m * busy.launch,
        Term.TP_COMM: wire[axes.TP],
        Term.CP_COMM: _context(request, columns, traffic, attention),
        Term.EP_COMM: wire[axes.EP] - _beside_experts(columns, wire[axes.EP], 3 * m * busy.expert_forward),
        Term.PP_COMM: EXPOSED_SENDS * wire[axes.PP],
        Term.DP_COMM: _data_parallel(request, columns, traffic, busy),
        **_update(view, busy),
    }


def _keep_slower(terms: Terms, rows: Ints, other: Terms) -> None:
    """Replace these rows of `terms` where `other` takes longer."""
    slower = _total(other) > _total(terms)[rows]
    chosen = rows[slower]
    for term, values in terms.items():
        values[chosen] = other[term][slower]


def _wire(request: Request, columns: Columns, traffic: Traffic) -> dict[str, Floats]:
    """Seconds per step of communication that blocks compute."""
    seconds = {
        axis: _seconds(axis_link(request.cluster, columns, (axis,)), traffic.of(axis)) for axis in (axes.TP, axes.PP)
    }
    moved, count = traffic.of(axes.EP)
    seconds[axes.EP] = expert_link(request.cluster, columns).exchange_seconds(moved, num_calls=count)
    return seconds


def _context(request: Request, columns: Columns, traffic: Traffic, attention: Floats) -> Floats:
    """Seconds of exchanges that attention does not hide. It hides a ring's, but for the part whose next keys and values
    are not sent."""
    if not np.any(columns.cp > 1):
        return np.zeros(len(columns))
    near, far = context_links(request.cluster, columns)
    heads, passed = (traffic.of(axes.CP, collective=name) for name in ("all_to_all", "send"))
    gathered, reduced = (
        _seconds(far, traffic.of(axes.CP, collective=name)) for name in ("all_gather", "reduce_scatter")
    )
    beside = OVERLAP * attention * (columns.key_ranks - 1) / columns.key_ranks
    hops = np.maximum(far.hop_seconds(passed[0], num_calls=passed[1]) - beside, 0.0)
    return near.exchange_seconds(heads[0], num_calls=heads[1]) + gathered + reduced + hops


def _beside_experts(columns: Columns, exchange: Floats, experts: Floats) -> Floats:
    """Seconds of exchanges that the experts of other chunks hide: all but one chunk's."""
    return (1 - 1 / columns.expert_chunks) * np.minimum(exchange, OVERLAP * experts)


def _data_parallel(request: Request, columns: Columns, traffic: Traffic, busy: BlockSeconds) -> Floats:
    """All-gathers and reduce-scatters that compute does not hide; the first and the last are always exposed."""
    m = columns.microbatches.astype(np.float64)
    shards = (axes.DP_SHARD, axes.EDP)
    links = {axis: link_of(request.cluster, columns, axis) for axis in shards}
    forward, backward = (
        sum((_seconds(link, traffic.of(axis, phase=phase)) for axis, link in links.items()), np.zeros(len(columns)))
        for phase in ("forward", "backward")
    )
    if np.any(columns.secondary_shard):  # its gathers take another link
        again = traffic.of(axes.DP_SHARD, phase="backward", collective="all_gather")
        near = backward_link(request.cluster, columns)
        backward = backward - _seconds(links[axes.DP_SHARD], again) + _seconds(near, again)
    if request.precision.has_coded_sums:
        flat = traffic.of(axes.DP_SHARD, phase="backward", collective="all_to_all")
        exchanged = _exchanged(links[axes.DP_SHARD], flat) + _by_node(request, columns, traffic)
        backward = backward - _seconds(links[axes.DP_SHARD], flat) + exchanged * (columns.zero > 0)
    beside_forward = np.where(columns.zero == 3, m, 1.0) * busy.forward * OVERLAP
    beside_backward = np.where(columns.zero >= 2, m, 1.0) * busy.backward * OVERLAP
    exposed = np.maximum(forward - beside_forward, 0.0) + np.maximum(backward - beside_backward, 0.0)
    ends = (forward + backward) / np.maximum(traffic.of(*shards, axes.DP_BETWEEN)[1], 1.0)
    lost = CONTENTION * (forward + backward - exposed)
    return exposed + ends + lost + _between_replicas(request, columns, traffic, busy)


def _between_replicas(request: Request, columns: Columns, traffic: Traffic, busy: BlockSeconds) -> Floats:
    """The gradient all-reduce over replicas overlaps only with the backward of the last micro-batch."""
    everyone = axis_link(request.cluster, columns, (axes.DP_REPLICATE, axes.DP_SHARD, axes.CP))
    replicas = axis_link(request.cluster, columns, (axes.DP_REPLICATE,))
    moved = traffic.of(axes.DP_REPLICATE)
    by_backend = np.where(columns.zero == 0, _seconds(everyone, moved), _seconds(replicas, moved))
    if request.precision.has_coded_sums:
        sent, gathered = (traffic.of(axes.DP_REPLICATE, collective=name) for name in ("all_to_all", "all_gather"))
        of_all, of_replicas = (_exchanged(link, sent) + _seconds(link, gathered) for link in (everyone, replicas))
        by_backend = np.where(columns.zero == 0, of_all + _by_node(request, columns, traffic), of_replicas)
        far = traffic.of(axes.DP_BETWEEN)  # of replicas, without shards
        moved = moved[0] + far[0] * (columns.zero == 0), moved[1] + far[1] * (columns.zero == 0)
    seconds = np.where(columns.all_reduce > 0, replica_seconds(columns, (everyone, replicas), *moved), by_backend)
    tail = seconds / np.maximum(moved[1], 1.0)
    return np.where(moved[0] > 0, np.maximum(seconds - busy.backward * OVERLAP, 0.0) + tail, 0.0)


def _exchanged(link: AxisLink, moved_and_count: tuple[Floats, Floats]) -> Floats:
    moved, count = moved_and_count
    return link.exchange_seconds(moved, num_calls=count)


def _by_node(request: Request, columns: Columns, traffic: Traffic) -> Floats:
    """Seconds of sums of gradients in codes, inside nodes and between them."""
    links = node_links(request.cluster, columns)
    return sum((_exchanged(link, traffic.of(axis)) for axis, link in links.items()), np.zeros(len(columns)))


def _update(view: View, busy: BlockSeconds) -> Terms:
    """Weights, gradients and states are read and written once; offloaded ones stream (state_stream.py)."""
    columns, sizes, cluster = view.columns, view.sizes, view.request.cluster
    held = held_elements(view)
    per_parameter = 2 * sizes.master + sizes.gradient + 2 * sizes.optimizer
    on_device = UPDATE_PASSES * held * per_parameter / (cluster.device.memory_bytes_per_s * cluster.device.memory_share)
    moved = transfers_of(view, busy)
    return {
        Term.OPTIMIZER: np.where(columns.offload_optimizer > 0, 0.0, on_device + muon.update_seconds(view)),
        Term.OFFLOAD: moved.update.exposed_s,
        Term.OFFLOAD_COPIES: moved.forward.exposed_s + moved.backward.exposed_s,
    }


def _seconds(link: AxisLink, moved_and_count: tuple[Floats, Floats]) -> Floats:
    moved, count = moved_and_count
    return link.seconds(moved, num_calls=count)


def _peak_flops(request: Request) -> float:
    peaks = request.cluster.device.peak_flops
    return peaks.get(rate_format(request)) or max(peaks.values())


def _total(terms: Terms) -> Floats:
    values = list(terms.values())
    return np.asarray(sum(values[1:], start=values[0]), dtype=np.float64)
