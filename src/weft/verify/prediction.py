"""Measured traffic and memory of a step against the estimate of `weft plan`, term by term.

Bytes on the wire must equal the estimate; weights and optimizer states too, but for the allocator's rounding. Other
memory terms are compared on full-size models (the ledger of a run): a model of a few layers does not represent them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.core import axes
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm as Term
from weft.engine.engine import Engine
from weft.engine.measure.meter import StepMeter
from weft.engine.measure.tracker import ROUNDING_BYTES
from weft.engine.objective import Batch
from weft.plan.estimate import estimate
from weft.train.ledger.predicted import Prediction, predict
from weft.verify.verdict import Check, Finding

NAME = "prediction"
HELD = (Term.WEIGHTS, Term.OPTIMIZER_STATE, Term.WEIGHT_VERSIONS)
SHARE = 0.01  # of traffic: the planner's shape of a rare family may pad a small tensor differently
TENSORS_PER_PARAMETER = 4  # the weight, two moments, a step counter: each rounded up by the allocator

Traffic = Sequence[Mapping[str, Any]]


def check_prediction(engine: Engine, batches: Sequence[Batch], run: RunSpec, plan: Plan) -> Check:
    """Check measured steps against the plan's estimate. Collective: every rank steps; the answer is this rank's."""
    meter = StepMeter(engine)
    for batch in batches:
        with meter.measuring():
            meter.next_step()
            engine.step(batch)
    found, why_not = predict(run, plan, config=engine.model.config, device_name=None)
    why_not = why_not or _unfit(found, engine)
    if found is None or why_not:
        return Check.passed(NAME, f"not judged: {why_not}")
    if not _is_predicted(engine):
        return Check.passed(NAME, "judged on the first rank")
    # a pipeline is checked on its first rank, which need not be the fullest
    predicted = found.estimate if plan.mesh.pp == 1 else estimate(found.request, plan, place="first")
    tensors = len(list(engine.model.parameters()))
    # 8-bit optimizers keep small tensors in float32, and all are small here
    terms: tuple[Term, ...] = HELD[:1] if run.train.optimizer == "adamw8bit" else HELD
    if not meter.is_complete:
        terms = ()  # the steps differed too much to measure at the peak; traffic can still be checked
    memory = {str(term): predicted.memory_terms.get(term, 0) for term in terms}
    return judge(predicted.traffic, meter.traffic, memory, meter.peak.terms, tensors=tensors)


def judge(planned: Traffic, sent: Traffic, terms: Mapping[str, int], held: Mapping[str, int], *, tensors: int) -> Check:
    """Check one rank's traffic rows and the memory terms that are predicted in `terms`."""
    predicted, found = _wire(planned), _wire(sent)
    for key in sorted(set(predicted) | set(found)):
        expected, real = predicted.get(key, 0), found.get(key, 0)
        if abs(real - expected) > SHARE * max(expected, real):
            return _wrong(" ".join(key), f"{expected:,} bytes per step", f"{real:,}")
    slack = ROUNDING_BYTES * TENSORS_PER_PARAMETER * tensors
    for term, expected in terms.items():
        real = held.get(term, 0)
        if abs(real - expected) > slack + SHARE * expected:
            return _wrong(str(term), f"{expected:,} bytes", f"{real:,}")
    return Check.passed(NAME, f"{sum(found.values()):,} bytes on the wire, weights and states as predicted")


def _unfit(found: Prediction | None, engine: Engine) -> str:
    """Why a prediction cannot be checked: the planner knows the model, or its use, only roughly."""
    if found is None or found.notes:
        return "; ".join(found.notes) if found else ""
    counted = found.request.shape.num_parameters
    real = _num_parameters(engine)
    return "" if counted == real else f"the planner counts {counted:,} parameters, the model has {real:,}"


def _num_parameters(engine: Engine) -> int:
    """Parameters of all stages. Collective."""
    sizes = [
        _full_size(name, parameter, engine)
        for name, parameter in engine.model.named_parameters()
        if name not in engine.layout.copies
    ]
    total = torch.tensor(sum(sizes), dtype=torch.int64, device=engine.device)
    if engine.topology.pp_degree > 1:
        dist.all_reduce(total, group=engine.topology.group(axes.PP))
    return int(total)


def _full_size(name: str, parameter: torch.Tensor, engine: Engine) -> int:
    """Elements of the parameter before tensor parallelism sharded it."""
    return math.prod(engine.shards[name].shape) if name in engine.shards else parameter.numel()


def _is_predicted(engine: Engine) -> bool:
    """Whether the estimate is valid for this rank. It is made for the first rank: others may have fewer vocabulary rows
    or none of a repeated key-value head."""
    return dist.get_rank() == 0 or (not engine.shards and engine.topology.pp_degree == 1)


def _wire(rows: Traffic) -> dict[tuple[str, str, str], int]:
    return {(row["axis"], row["collective"], row["phase"]): int(row["bytes"]) for row in rows if row["bytes"]}


def _wrong(what: str, expected: str, found: str) -> Check:
    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else None
    return Check.failed(NAME, Finding(rule=9, parameter=what, coordinates=rank, expected=expected, found=found))
