"""ledger.json: facts and costs of a run, by the terms of core.terms: predicted | dry run | measured | error.

Measured memory is that of the peak of a step on the fullest rank (measuring.py). Without a measurement, terms are
counted on live tensors and `other` is the rest of the peak. The command line adds the dry run's column later.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from weft.checkpoint.memory_copies import MemoryCopies
from weft.core.records import EvalRecord, StepRecord
from weft.core.terms import MemoryTerm, TimeTerm
from weft.engine.engine import Engine
from weft.engine.kernels.fast_path import fast_path
from weft.engine.offload.slab import is_host_memory
from weft.engine.optim.adamw_8bit import quantised_parts
from weft.engine.ownership import local
from weft.engine.precision import gradient_dtype
from weft.models.adapter.quantised import codes_by_name
from weft.train.ledger.measuring import Measured
from weft.train.ledger.offloaded import offload_rows, process_peak_bytes
from weft.train.ledger.predicted import Prediction
from weft.train.ledger.rows import collective_rows, memory_rows, row, time_rows, total_row, traffic_rows

_RESIDENT = (MemoryTerm.WEIGHTS, MemoryTerm.OPTIMIZER_STATE)
_COUNTED = (MemoryTerm.WEIGHTS, MemoryTerm.GRADIENTS, MemoryTerm.OPTIMIZER_STATE, MemoryTerm.BUFFERS)


def peak_memory_bytes(device: torch.device) -> int:
    """The allocator's peak on a GPU, the process's peak resident memory on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return process_peak_bytes()


def memory_terms(engine: Engine) -> dict[MemoryTerm, int]:
    """This rank's bytes by term, counted on live tensors."""
    states = (value for state in engine.optimizer.state.values() for value in state.values())
    held = [value for value in states if isinstance(value, torch.Tensor) and not is_host_memory(local(value))]
    counted = {
        MemoryTerm.WEIGHTS: sum(map(_held_bytes, engine.model.parameters())),
        MemoryTerm.GRADIENTS: sum(_gradient_bytes(parameter) for parameter in engine.parameters),
        MemoryTerm.OPTIMIZER_STATE: sum(map(_bytes, held)),
        MemoryTerm.BUFFERS: sum(_bytes(buffer) for buffer in engine.model.buffers()),
    }
    rest = peak_memory_bytes(engine.device) - sum(counted.values())
    return {**counted, MemoryTerm.OTHER: max(0, rest)}


def measured_terms(measured: Measured) -> dict[str, int] | None:
    """The terms at the peak. Memory of a GPU's allocator beyond the tensors belongs to kernels: workspaces.

    With compiled blocks it is their saved activations, which the tracker cannot see."""
    if measured.peak is None:
        return None
    hidden_bytes = max(0, measured.allocated_bytes - measured.peak.peak_bytes)
    term = MemoryTerm.ACTIVATIONS if measured.is_compiled else MemoryTerm.TEMPORARIES
    found = measured.peak.terms.get(term, 0) + hidden_bytes
    return {**measured.peak.terms, **({str(term): found} if found else {})}


def gather_memory(engine: Engine, measured: Measured | None = None) -> list[dict[str, Any]]:
    """Every rank's memory row, on every rank. Collective."""
    terms = measured_terms(measured) if measured else None
    found = terms if terms is not None else {str(term): size for term, size in memory_terms(engine).items()}
    is_cuda = engine.device.type == "cuda"
    values = [
        peak_memory_bytes(engine.device),
        torch.cuda.max_memory_reserved(engine.device) if is_cuda else 0,
        measured.before_bytes if measured else 0,
        int(terms is not None),
        *(found.get(term, -1) for term in MemoryTerm),
    ]
    own = torch.tensor(values, dtype=torch.int64, device=engine.device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return [_rank_row(rank, gathered.tolist()) for rank, gathered in enumerate(rows)]


def _rank_row(rank: int, values: list[int]) -> dict[str, Any]:
    peak_bytes, reserved_bytes, before_bytes, is_measured, *sizes = values
    terms = {str(term): size for term, size in zip(MemoryTerm, sizes, strict=True) if size >= 0}
    gpu = {"reserved_bytes": reserved_bytes, "before_steps_bytes": before_bytes} if reserved_bytes else {}
    step = {"step_peak_bytes": sum(terms.values())} if is_measured else {}
    return {"rank": rank, "peak_bytes": peak_bytes, **step, **gpu, "terms": terms}


def count_parameters(engine: Engine) -> tuple[int, int]:
    """Elements of the full model, and of its trainable parameters. Collective where an axis partitions the model."""
    in_codes = codes_by_name(engine.model)
    own = {name: value for name, value in engine.model.named_parameters() if name not in engine.layout.copies}
    sizes = {name: value.numel() for name, value in own.items()}
    sizes |= {name: own[name].shape[0] * form.columns for name, form in in_codes.items() if name in own}
    trained = sum(size for name, size in sizes.items() if own[name].requires_grad)
    counts = torch.tensor([sum(sizes.values()), trained], device=engine.device)
    engine.topology.sum_over(counts, engine.axes.partitioning)
    return int(counts[0]), int(counts[1])


def last_evaluations(metrics: Sequence[StepRecord]) -> dict[str, EvalRecord]:
    """The last values of each set of [[data.evaluation]]."""
    return {name: one for record in metrics for name, one in (record.evaluations or {}).items()}


def build_ledger(
    engine: Engine,
    *,
    run_facts: dict[str, Any],
    model_name: str,
    notes: Sequence[str],
    memory_ranks: list[dict[str, Any]],
    metrics: Sequence[StepRecord],
    seconds_per_step: dict[TimeTerm, float],
    checkpoints: list[dict[str, Any]],
    measured: Measured | None = None,
    prediction: Prediction | None = None,
    remarks: Sequence[str] = (),
    warnings: Sequence[str] = (),
    pipeline: dict[str, Any] | None = None,
    copies: MemoryCopies | None = None,
) -> dict[str, Any]:
    """The ledger as JSON. Collective. `measured` is this rank's; `remarks` explain empty columns."""
    num_parameters, num_trained = count_parameters(engine)
    first, last = (metrics[0], metrics[-1]) if metrics else (None, None)
    evaluated = [record.eval_loss for record in metrics if record.eval_loss is not None]
    return {
        "version": 1,
        "run": {
            "strategy": engine.plan.strategy_name,
            "num_ranks": engine.plan.num_ranks,
            "device": engine.device.type,
            "device_name": device_name(engine.device),
            "versions": versions(),
            "first_loss": first.loss if first else None,
            "final_loss": last.loss if last else None,
            "eval_loss": evaluated[-1] if evaluated else None,
            "evaluations": {name: one.as_dict() for name, one in last_evaluations(metrics).items()},
            "tokens_per_s": _median([record.tokens_per_s for record in metrics[1:]]),
            **run_facts,
        },
        "model": {
            "name": model_name,
            "parameters": num_parameters,
            "trainable_parameters": num_trained,
            "units": list(engine.layout.units),
            "notes": list(notes),
        },
        "memory": _memory(memory_ranks, prediction, measured),
        "traffic": traffic_rows(prediction, measured),
        "offload": offload_rows(engine, prediction, copies),
        "time": _time(metrics, seconds_per_step, prediction, measured),
        "pipeline": pipeline,
        "flops": measured.flops if measured else None,
        "prediction": _prediction_facts(prediction) if prediction else None,
        "remarks": [*remarks, *(prediction.notes if prediction else ())],
        "warnings": list(warnings),
        "float8": engine.float8.summary(),
        "fast_path": [record.as_dict() for record in fast_path(engine)],
        "dtypes": [asdict(record) for record in engine.dtypes()],
        "coverage": [asdict(record) for record in engine.coverage()],
        "buffers": [asdict(record) for record in engine.buffers()],
        "checkpoints": checkpoints,
    }


def _prediction_facts(prediction: Prediction) -> dict[str, Any]:
    return {
        "device": prediction.device,
        "calibrated": prediction.request.cluster.calibrated,
        "fits": prediction.estimate.fits,
    }


def _memory(ranks: list[dict[str, Any]], prediction: Prediction | None, measured: Measured | None) -> dict[str, Any]:
    stepped = [rank for rank in ranks if "step_peak_bytes" in rank]
    fullest = max(stepped, key=lambda rank: rank["step_peak_bytes"], default=None)
    terms = memory_rows(prediction, fullest["terms"]) if fullest is not None else _counted_rows(ranks, prediction)
    inside = terms if fullest is not None else memory_rows(prediction, None)
    return {
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "ranks": ranks,
        "terms": terms,
        "total": total_row(inside),
        "peak_at": {
            "predicted": prediction.estimate.peak_at if prediction else None,
            "measured": measured.peak.as_dict()["peak_at"] if measured and measured.peak else None,
        },
        "largest": measured.peak.as_dict()["largest"] if measured and measured.peak else [],
    }


def _counted_rows(ranks: list[dict[str, Any]], prediction: Prediction | None) -> dict[str, Any]:
    """Rows of memory that is live between steps; only terms that are resident at the peak too have a prediction."""
    predicted = memory_rows(prediction, None)
    rows = dict(predicted)
    for term in (*_COUNTED, MemoryTerm.OTHER):
        expected = predicted.get(term) if term in _RESIDENT else None
        measured = max(rank["terms"][term] for rank in ranks)
        rows[str(term)] = row(predicted=expected["predicted"] if expected else None, measured=measured)
    return rows


def _time(
    metrics: Sequence[StepRecord],
    seconds_per_step: dict[TimeTerm, float],
    prediction: Prediction | None,
    measured: Measured | None,
) -> dict[str, Any]:
    step_s = _median([record.step_s for record in metrics[1:]])
    return {
        "step_s": step_s,
        "step": row(predicted=prediction.estimate.step_s if prediction else None, measured=step_s or None),
        "terms": time_rows(prediction, seconds_per_step),
        "collectives": collective_rows(measured),
        "mfu": prediction.mfu_at(step_s) if prediction else None,
    }


def versions() -> dict[str, str]:
    import transformers

    import weft

    return {
        "weft": weft.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _held_bytes(parameter: torch.nn.Parameter) -> int:
    """On the device: weights that rest on the host have no storage there."""
    return min(_bytes(parameter), local(parameter.detach()).untyped_storage().nbytes())


def _gradient_bytes(parameter: torch.nn.Parameter) -> int:
    return local(parameter).numel() * gradient_dtype(parameter).itemsize


def _bytes(tensor: torch.Tensor) -> int:
    shards = quantised_parts(tensor)
    if shards is not None:
        return shards.codes.nbytes + shards.scales.nbytes
    return local(tensor).nbytes


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
