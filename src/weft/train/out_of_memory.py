"""Out of memory as one sentence: phase and module, bytes requested, device memory, largest terms, a plan that fits.

with explained(scene):          # scene: the facts known so far; the worker adds to it while the run is built
    ...
"""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.core.errors import MemoryLimitError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm
from weft.core.units import format_bytes
from weft.engine.engine import Engine
from weft.train.ledger.ledger import memory_terms
from weft.train.ledger.measuring import Measuring
from weft.train.ledger.predicted import predict
from weft.train.ranks.failures import is_out_of_memory, phase_of, set_phase

LARGEST = 3  # terms that the sentence names
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMG]iB)", re.IGNORECASE)
_FREE = re.compile(r"of which ([\d.]+) (bytes|[KMG]iB) is free", re.IGNORECASE)


@dataclass(kw_only=True)
class OutOfMemoryScene:
    """Facts about the run known so far."""

    run: RunSpec
    plan: Plan
    device: torch.device
    local_ranks: int = 1
    config: Any = None
    engine: Engine | None = None
    measuring: Measuring | None = None


@contextmanager
def explained(scene: OutOfMemoryScene) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryLimitError) or not is_out_of_memory(error):
            raise
        explanation = explain(error, scene)
        set_phase(explanation, phase_of(error))
        raise explanation from error


def explain(error: Exception, scene: OutOfMemoryScene) -> MemoryLimitError:
    """The error with its sentence and hint. A failure in here must not hide the original error."""
    asked_bytes, total_bytes = _bytes(_ASKED, error), _device_bytes(scene)
    parts = [
        f"out of memory in {_where(error, scene)}",
        f"{format_bytes(asked_bytes)} were requested" if asked_bytes else "",
        _device(error, total_bytes),
        _held(scene),
    ]
    sentence = "; ".join(part for part in parts if part)
    return MemoryLimitError(sentence, hint=_hint(scene, asked_bytes or 0, total_bytes))


def _where(error: Exception, scene: OutOfMemoryScene) -> str:
    """'step 3, backward of model.layers.3.mlp': the part from the stack, the module from it or from the meter."""
    failed = scene.measuring.failed if scene.measuring is not None else None
    part, module = (failed.phase, failed.module) if failed is not None else ("", "")
    part = part or _part(error)
    if not module and scene.engine is not None:
        module = _module(error, scene.engine.model)
    return phase_of(error) + (f", {part}" if part else "") + (f" of {module}" if part and module else "")


def _part(error: BaseException) -> str:
    """The part of a step that was running, from the function names on the stack."""
    names = [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    if any(name == "evaluate" for _, name in names):
        return "forward"
    if any(name in ("backward", "_engine_run_backward") for _, name in names):
        return "backward"
    if any(name == "_update" for _, name in names):
        return "update"
    return "forward" if any(name == "_forward_backward" for _, name in names) else ""


def _module(error: BaseException, model: nn.Module) -> str:
    """The innermost module whose forward is on the stack."""
    names = {id(module): name for name, module in model.named_modules()}
    found, link = "", error.__traceback__
    while link is not None:
        found = names.get(id(link.tb_frame.f_locals.get("self"))) or found
        link = link.tb_next
    return found


def _device(error: Exception, total_bytes: int | None) -> str:
    free_bytes = _bytes(_FREE, error)
    has = f"the device has {format_bytes(total_bytes)}" if total_bytes else ""
    return f"{has}, {format_bytes(free_bytes)} of it free" if has and free_bytes is not None else has


def _held(scene: OutOfMemoryScene) -> str:
    terms = _terms_now(scene)
    named = [f"{term.replace('_', ' ')} {format_bytes(size)}" for term, size in terms.most_common(LARGEST) if size]
    return f"it held {', '.join(named)}" if named else ""


def _terms_now(scene: OutOfMemoryScene) -> Counter[str]:
    """Bytes by term from the meter if it was measuring, else counted on live tensors."""
    if scene.measuring is not None and scene.measuring.failed is not None:
        found: Counter[str] = Counter()
        for holder in scene.measuring.failed.holders:
            found[holder.term] += holder.nbytes
        return found
    if scene.engine is None:
        return Counter()
    counted = {str(term): size for term, size in memory_terms(scene.engine).items() if term != MemoryTerm.GRADIENTS}
    gradients = [parameter.grad for parameter in scene.engine.parameters if parameter.grad is not None]
    counted[str(MemoryTerm.GRADIENTS)] = sum(gradient.nbytes for gradient in gradients)
    if scene.device.type != "cuda":
        counted.pop(str(MemoryTerm.OTHER), None)  # memory of the process, not of its tensors
    return Counter(counted)


def _hint(scene: OutOfMemoryScene, asked_bytes: int, total_bytes: int | None) -> str:
    """The planner's smallest change for a budget below its estimate of the plan, since that estimate did not fit."""
    general = "use more micro-batches, recompute activations, or more ranks"
    try:
        from weft.plan.changes import smallest_changes

        name = torch.cuda.get_device_name(scene.device) if scene.device.type == "cuda" else None
        found, _ = predict(scene.run, scene.plan, config=scene.config, device_name=name)
        if found is None:
            return general
        estimated = found.estimate.memory_bytes
        budget = min(total_bytes or estimated, estimated - max(1, min(asked_bytes, estimated // 2)))
        changes = smallest_changes(found.request, scene.plan, budget_bytes=budget, trained_only=True)
    except Exception:  # a hint that cannot be computed must not hide the sentence
        return general
    return f"the smallest change that would fit: {changes[0].text}" if changes else general


def _device_bytes(scene: OutOfMemoryScene) -> int | None:
    """A GPU's memory, or this rank's share of the host's."""
    if scene.device.type == "cuda":
        return int(torch.cuda.get_device_properties(scene.device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // scene.local_ranks
    except (AttributeError, OSError, ValueError):
        return None


def _bytes(pattern: re.Pattern[str], error: Exception) -> int | None:
    found = pattern.search(str(error))
    return round(float(found[1]) * _UNITS[found[2].lower()]) if found else None
