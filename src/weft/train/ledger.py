"""ledger.json: what the run was and what it cost, by the terms of core.terms. Predictions join later in the same rows.

Memory terms are counted on the live tensors; `other` is what is left of the measured peak (activations, gathered
parameters, temporaries, and on a CPU the process itself).
"""

from __future__ import annotations

import platform
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from weft.core.records import StepRecord
from weft.core.terms import MemoryTerm, TimeTerm
from weft.engine.engine import Engine
from weft.engine.lowbit import quantised_parts
from weft.engine.ownership import local

_COUNTED = (MemoryTerm.WEIGHTS, MemoryTerm.GRADIENTS, MemoryTerm.OPTIMIZER_STATE, MemoryTerm.BUFFERS)


def peak_memory_bytes(device: torch.device) -> int:
    """The allocator's peak on a GPU, the process's resident peak on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def memory_terms(engine: Engine) -> dict[MemoryTerm, int]:
    """This rank's bytes by term, on the live tensors."""
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    counted = {
        MemoryTerm.WEIGHTS: sum(_bytes(parameter) for parameter in engine.model.parameters()),
        MemoryTerm.GRADIENTS: sum(_bytes(parameter) for parameter in engine.parameters),
        MemoryTerm.OPTIMIZER_STATE: sum(_bytes(value) for value in states if isinstance(value, torch.Tensor)),
        MemoryTerm.BUFFERS: sum(_bytes(buffer) for buffer in engine.model.buffers()),
    }
    rest = peak_memory_bytes(engine.device) - sum(counted.values())
    return {**counted, MemoryTerm.OTHER: max(0, rest)}


def gather_memory(engine: Engine) -> list[dict[str, Any]]:
    """Every rank's memory row, on every rank; collective."""
    terms = memory_terms(engine)
    row = torch.tensor([peak_memory_bytes(engine.device), *terms.values()], dtype=torch.int64, device=engine.device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [
        {
            "rank": rank,
            "peak_bytes": int(values[0]),
            "terms": dict(zip(map(str, terms), values[1:].tolist(), strict=True)),
        }
        for rank, values in enumerate(rows)
    ]


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
) -> dict[str, Any]:
    """The whole ledger, as JSON."""
    parameters = list(engine.model.parameters())
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
            "tokens_per_s": _median([record.tokens_per_s for record in metrics[1:]]),
            **run_facts,
        },
        "model": {
            "name": model_name,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trainable_parameters": sum(parameter.numel() for parameter in engine.parameters),
            "units": list(engine.layout.units),
            "notes": list(notes),
        },
        "memory": {
            "peak_bytes": max(row["peak_bytes"] for row in memory_ranks),
            "ranks": memory_ranks,
            "terms": {
                str(term): _row(max(rank["terms"][str(term)] for rank in memory_ranks))
                for term in (*_COUNTED, MemoryTerm.OTHER)
            },
        },
        "traffic": [],
        "time": {
            "step_s": _median([record.step_s for record in metrics[1:]]),
            "terms": {str(term): _row(value) for term, value in seconds_per_step.items()},
        },
        "dtypes": [asdict(record) for record in engine.dtypes()],
        "coverage": [asdict(record) for record in engine.coverage()],
        "checkpoints": checkpoints,
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


def _bytes(tensor: torch.Tensor) -> int:
    parts = quantised_parts(tensor)
    if parts is not None:
        return parts.codes.nbytes + parts.scales.nbytes
    return local(tensor).nbytes


def _row(measured: float) -> dict[str, float | None]:
    return {"predicted": None, "dry_run": None, "measured": measured}


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
