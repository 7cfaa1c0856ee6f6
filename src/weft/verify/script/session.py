"""The runs of a script that a verdict needs, in order; who starts their ranks is the caller's.

N ranks -> one process -> (again with N times the batch, if each rank has a DataLoader of its own)
-> one process with gradients rounded otherwise -> verdict
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weft.verify.script.compare import ScriptComparison
from weft.verify.script.trace import ScriptRun
from weft.verify.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run of the script."""

    num_ranks: int
    steps: int
    batch_scale: int = 1
    perturbed: bool = False


def verify_runs(start: Callable[[RunSettings], ScriptRun], *, name: str, num_ranks: int, steps: int) -> Verdict:
    """The verdict on the script `name`."""
    began_s, scale = time.perf_counter(), 1
    found = start(RunSettings(num_ranks=num_ranks, steps=steps))
    steps = found.num_steps
    reference = start(RunSettings(num_ranks=1, steps=steps))
    has_own_batches = reference.main.has_loader and not found.main.is_tensor_parallel
    if has_own_batches and found.num_rows == num_ranks * reference.num_rows:
        scale = num_ranks
        reference = start(RunSettings(num_ranks=1, steps=steps, batch_scale=scale))
    repeated = start(RunSettings(num_ranks=1, steps=steps, batch_scale=scale, perturbed=True))
    comparison = ScriptComparison(reference=reference, repeated=repeated, found=found)
    return comparison.verdict(name=name, is_scaled=scale > 1, elapsed_s=time.perf_counter() - began_s)
