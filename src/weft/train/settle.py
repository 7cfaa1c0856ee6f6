"""Resolve the choice that a plan may leave open until the device is known: the recompute mixture of a budget.

The planner chooses the blocks for the catalogue's figures of this machine's device (a CPU's too), so that the same plan
gives the same blocks on every machine of a kind; plan.toml of the run folder records them.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from weft import hardware
from weft.core.errors import PlanError
from weft.core.plan import Plan, with_mixture
from weft.core.run_spec import RunSpec
from weft.plan.ask import settle_budget
from weft.train.job import Job
from weft.train.predicted import find_device

_PRINT_NAME = "import torch; print(torch.cuda.get_device_name())"


def resolve_job(job: Job) -> Job:
    """The job without open choices, resolved before any rank starts; unchanged if nothing was open."""
    on_gpu = job.device != "cpu" and torch.cuda.device_count() > 0
    plan = job.plan(device_type="cuda" if on_gpu else "cpu")
    if not plan.activations.is_open:
        return job
    mixture = resolve_mixture(job.run, plan, on_gpu=on_gpu).activations.mixture or (0, 0)
    activations = {**job.plan_tables["activations"], "mixture": list(mixture)}
    return replace(job, plan_tables={**job.plan_tables, "activations": activations})


def resolve_mixture(run: RunSpec, plan: Plan, *, on_gpu: bool) -> Plan:
    """`plan` with the recompute mixture of its budget chosen for this machine's devices."""
    if not plan.activations.is_open:
        return plan
    name = _gpu_name() if on_gpu else None
    device = "CPU" if name is None else find_device(name, hardware.device_names())
    if device is None:
        raise PlanError(
            f"cannot choose the recompute mixture of a budget: the catalogue has no entry for {name}",
            hint="set it: activations.mixture = [full, selective]",
        )
    return settle_budget(run, plan, f"{plan.num_ranks}x{device}")


def broadcast_mixture(plan: Plan, *, device: torch.device) -> Plan:
    """The plan with rank 0's mixture: sharded blocks that recompute on some ranks only would deadlock."""
    mixture = plan.activations.mixture
    if mixture is None or dist.get_world_size() == 1:
        return plan
    counts = torch.tensor(mixture, dtype=torch.int64, device=device)
    dist.broadcast(counts, src=0)
    full, selective = counts.tolist()
    return with_mixture(plan, (full, selective))


def _gpu_name() -> str:
    """The device name, read in a child process: a launcher with a CUDA context would hold GPU memory all along."""
    child = subprocess.run([sys.executable, "-c", _PRINT_NAME], capture_output=True, text=True, check=False)
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise PlanError(
            f"cannot choose the recompute mixture of a budget: torch.cuda.get_device_name() failed: {reason}",
            hint="set it: activations.mixture = [full, selective]; or use --device cpu",
        )
    return child.stdout.strip()
