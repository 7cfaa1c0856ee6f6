"""Measured traffic and memory of a step against the estimate of `weft plan`, term by term.

Bytes on the wire must equal the estimate; weights and optimizer states too, but for the allocator's rounding. Tokens
travel to experts by the router's choice, of which the planner knows the mean: there only numbers are compared
(`planned.py`). The planner counts a gradient of every parameter: where the loss does not depend on some, sums of
gradients and optimizer states are at most the estimate, and units that do not run are not gathered. Other memory terms
are compared on full-size models (the ledger of a run): a model of a few layers does not represent them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist

from weft.core import axes
from weft.core.optimizers import is_averaged
from weft.core.plan import Plan
from weft.core.records import ParameterRecord
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm as Term
from weft.core.wire_bytes import BLOCK
from weft.engine.engine import Engine
from weft.engine.measure.meter import StepMeter
from weft.engine.measure.tracker import ROUNDING_BYTES
from weft.engine.objective import Batch
from weft.plan.estimate import estimate
from weft.train.ledger.predicted import predict
from weft.verify.planned import Traffic, inexact_shape, rows_by_kind
from weft.verify.verdict import Check, Finding

NAME = "prediction"
HELD = (Term.WEIGHTS, Term.OPTIMIZER_STATE, Term.WEIGHT_VERSIONS)
ROUTED = (axes.EP, "all_to_all")
OF_GRADIENTS, GATHER = ("reduce_scatter", "all_reduce"), "all_gather"
OF_REPLICAS = (axes.DP_REPLICATE, axes.DP_INSIDE, axes.DP_BETWEEN)
SHARE = 0.01  # of traffic: the planner's shape of a rare family may pad a small tensor differently
SHARE_SLACK = 2 * BLOCK  # bytes of a message: shares of an all-reduce in codes are whole blocks
TENSORS_PER_PARAMETER = 4  # the weight, two moments, a step counter: each rounded up by the allocator
NUMBERS_OF_AVERAGES = 2  # of schedule-free AdamW beside its counter: the largest rate, the sum of squared rates


def check_prediction(
    engine: Engine,
    batches: Sequence[Batch],
    run: RunSpec,
    plan: Plan,
    coverage: Sequence[ParameterRecord],
    *,
    untrained: Collection[str] = (),
) -> Check:
    """Check measured steps against the plan's estimate. Collective: every rank steps; the answer is this rank's.

    `untrained`: trainable parameters that get no gradient."""
    meter = StepMeter(engine)
    for batch in batches:
        with meter.measuring():
            meter.next_step()
            engine.step(batch)
    found, why_not = predict(run, plan, config=engine.model.config, device_name=None)
    if found is not None:
        why_not = "; ".join(found.notes) or inexact_shape(found, plan, coverage)
    if found is None or why_not:
        return Check.passed(NAME, f"not judged: {why_not}")
    if not _is_predicted(engine):
        return Check.passed(NAME, "judged on the first rank")
    # a pipeline is checked on its first rank, which need not be the fullest
    predicted = found.estimate if plan.mesh.pp == 1 else estimate(found.request, plan, place="first")
    numbers = NUMBERS_OF_AVERAGES if is_averaged(run.train.optimizer) else 0
    tensors = len(list(engine.model.parameters()))
    # 8-bit optimizers keep small tensors in float32, and all are small here
    terms: tuple[Term, ...] = HELD[:1] if run.train.optimizer == "adamw8bit" else HELD
    if not meter.is_complete:
        terms = ()  # the steps differed too much to measure at the peak; traffic can still be checked
    memory = {str(term): predicted.memory_terms.get(term, 0) for term in terms}
    held = meter.peak.terms
    replicas = plan.mesh.dp_replicate if plan.data_parallel.zero else plan.mesh.dp_degree * plan.mesh.cp
    uneven = SHARE_SLACK * (replicas - 1) if plan.precision.policy().has_coded_sums else 0
    return judge(
        predicted.traffic, meter.traffic, memory, held,
        tensors=tensors, per_parameter=TENSORS_PER_PARAMETER + numbers, num_untrained=len(untrained),
        idle=idle_share(coverage, untrained), uneven=uneven,
    )  # fmt: skip


def idle_share(coverage: Sequence[ParameterRecord], untrained: Collection[str]) -> float:
    """The share of parameters in units without any gradient. Such a unit may not run at all, as the vision tower of a
    model that reads text does, and is not gathered then."""
    sizes, idle = Counter[str](), {row.unit for row in coverage}
    for row in (row for row in coverage if row.tied_to is None):
        sizes[row.unit] += math.prod(row.shape)
        if row.name not in untrained:
            idle.discard(row.unit)
    return sum(sizes[unit] for unit in idle) / (sizes.total() or 1)


def judge(
    planned: Traffic,
    sent: Traffic,
    terms: Mapping[str, int],
    held: Mapping[str, int],
    *,
    tensors: int,
    per_parameter: int = TENSORS_PER_PARAMETER,
    num_untrained: int = 0,
    idle: float = 0.0,
    uneven: int = 0,
) -> Check:
    """Check one rank's traffic rows and the memory terms that are predicted in `terms`. `idle`: the share of weights
    that may not be gathered; `uneven`: bytes by which a sum over replicas may differ."""
    counts = {key: row.get("count", 0) for key, row in rows_by_kind(sent).items()}
    predicted, found = ({key: int(row["bytes"]) for key, row in rows_by_kind(rows).items()} for rows in (planned, sent))
    for key in sorted(set(predicted) | set(found)):
        expected, real = predicted.get(key, 0), found.get(key, 0)
        if key[:2] == ROUTED and expected and real:
            continue
        may_be_less = num_untrained > 0 and key[1] in OF_GRADIENTS
        slack = uneven * counts.get(key, 0) if key[0] in OF_REPLICAS else 0
        if key[1] == GATHER and real < expected:
            slack += idle * expected
        if _gap(real, expected, may_be_less=may_be_less) > SHARE * max(expected, real) + slack:
            return _wrong(" ".join(key), f"{_most(may_be_less)}{expected:,} bytes per step", f"{real:,}")
    slack = ROUNDING_BYTES * per_parameter * tensors
    for term, expected in terms.items():
        real = held.get(term, 0)
        may_be_less = num_untrained > 0 and term == str(Term.OPTIMIZER_STATE)
        if _gap(real, expected, may_be_less=may_be_less) > slack + SHARE * expected:
            return _wrong(str(term), f"{_most(may_be_less)}{expected:,} bytes", f"{real:,}")
    less = f"; gradients and states at most: {num_untrained} parameters get no gradient" if num_untrained else ""
    return Check.passed(NAME, f"{sum(found.values()):,} bytes on the wire, weights and states as predicted{less}")


def _gap(real: int, expected: int, *, may_be_less: bool) -> int:
    return max(0, real - expected) if may_be_less else abs(real - expected)


def _most(may_be_less: bool) -> str:
    return "at most " if may_be_less else ""


def _is_predicted(engine: Engine) -> bool:
    """Whether the estimate is valid for this rank. It is made for the first rank: others may have fewer vocabulary rows
    or none of a repeated key-value head."""
    return dist.get_rank() == 0 or (not engine.shards and engine.topology.pp_degree == 1)


def _wrong(what: str, expected: str, found: str) -> Check:
    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else None
    return Check.failed(NAME, Finding(rule=9, parameter=what, coordinates=rank, expected=expected, found=found))
