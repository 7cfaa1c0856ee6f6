"""The planner's estimate of the run: the `predicted` column of the ledger.

The planner reads the model's config alone and imports nothing of the engine, so it cannot copy measured values. A model
or a device that it does not know gives a note instead of a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from weft import hardware
from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import StepTerm, TimeTerm
from weft.plan.ask import ask, teacher_of
from weft.plan.estimate import Estimate, estimate
from weft.plan.request import Request


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The planner's estimate of one plan; `request` is for further estimates."""

    request: Request
    estimate: Estimate
    device: str  # its name in the catalogue
    notes: tuple[str, ...] = ()
    is_binding: bool = True  # False if the run uses features that the planner does not model

    def mfu_at(self, step_s: float | None) -> float | None:
        """The MFU of steps of this length; None on a CPU, whose peak is a guess."""
        if not step_s or self.request.is_cpu:
            return None
        return self.estimate.mfu * self.estimate.step_s / step_s

    @property
    def time_terms(self) -> dict[TimeTerm, float]:
        """The planner's terms of a step, summed to the terms that a run can measure."""
        terms = self.estimate.time_terms
        update_s = sum(terms.get(term, 0.0) for term in (StepTerm.OPTIMIZER, StepTerm.OFFLOAD))
        return {
            TimeTerm.FORWARD_BACKWARD: sum(terms.values()) - update_s,
            TimeTerm.OPTIMIZER: update_s,
        }


def predict(
    run: RunSpec, plan: Plan, *, config: Any, device_name: str | None, document_length: float | None = None
) -> tuple[Prediction | None, str]:
    """The prediction for `config`, a Hugging Face config; or None and the reason. `device_name` None: a CPU."""
    if plan.data_parallel.is_threaded:
        return None, "no predictions: the planner does not model nn.DataParallel"
    if config is None:
        return None, "no predictions: the model has no Hugging Face config"
    device = "CPU" if device_name is None else hardware.find_device(device_name)
    if device is None:
        return None, f"no predictions: the catalogue has no entry for {device_name}"
    try:
        request = request_for(run, plan, config=config, device=device, document_length=document_length)
        found = estimate(request, plan)
    except WeftError as error:
        return None, f"no predictions: {error.message}"
    except Exception as error:  # any config is possible here; a plan that cannot be estimated can still be trained
        return None, f"no predictions: the planner cannot shape this model ({type(error).__name__}: {error})"
    notes = _unknown_to_planner(run)
    return Prediction(request=request, estimate=found, device=device, notes=notes, is_binding=not notes), ""


def request_for(run: RunSpec, plan: Plan, *, config: Any, device: str, document_length: float | None = None) -> Request:
    """The planner's request for the trained model in the plan's precision."""
    question = ask(
        config.to_dict(),
        f"{plan.num_ranks}x{device}",
        global_batch=run.train.global_batch * run.objective.rows_per_sample,
        sequence_length=run.data.sequence_length,
        optimizer=run.train.optimizer,
        precision=plan.precision.model_dump(exclude_none=True),
    )
    workload = replace(
        question.request.workload,
        optimizer_kernel=run.train.optimizer_kernel,
        momentum=run.train.momentum,
        attention=run.model.attention,
        muon_precision=run.train.muon_precision,
        has_average=run.train.ema_decay > 0,
        rows_per_sample=run.objective.rows_per_sample,
        teacher=teacher_of(run),
        document_length=document_length,
    )
    return replace(question.request, workload=workload, tp_may_leave_node=True)


def _unknown_to_planner(run: RunSpec) -> tuple[str, ...]:
    found = []
    if run.train.frozen:
        found.append("the planner counts frozen parameters as trained ones")
    if run.data.isolates:
        found.append("the planner does not count the memory of attention masks of isolated documents")
    return tuple(found)
