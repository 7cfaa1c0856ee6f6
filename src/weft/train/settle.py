"""What a plan may leave open until the device is known: the blocks of a budget of recompute.

They are chosen by the planner for the catalogue's figures of the device that is here (a CPU's too), so that the same
plan gives the same blocks on every machine of a kind, and plan.toml of the run folder has them.
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

_ASK_NAME = "import torch; print(torch.cuda.get_device_name())"


def settle_job(job: Job) -> Job:
    """The job with nothing left to choose, before any rank starts; as it is where nothing was open."""
    on_gpu = job.device != "cpu" and torch.cuda.device_count() > 0
    plan = job.plan(device_type="cuda" if on_gpu else "cpu")
    if not plan.activations.is_open:
        return job
    mixture = settle_plan(job.run, plan, on_gpu=on_gpu).activations.mixture or (0, 0)
    activations = {**job.plan_tables["activations"], "mixture": list(mixture)}
    return replace(job, plan_tables={**job.plan_tables, "activations": activations})


def settle_plan(run: RunSpec, plan: Plan, *, on_gpu: bool) -> Plan:
    """`plan` with the blocks of its budget chosen for the devices that are here."""
    if not plan.activations.is_open:
        return plan
    name = _gpu_name() if on_gpu else None
    device = "CPU" if name is None else find_device(name, hardware.device_names())
    if device is None:
        raise PlanError(
            f"the blocks of a budget cannot be chosen here: the catalogue has no entry for {name}",
            hint="name them: activations.mixture = [full, selective]",
        )
    return settle_budget(run, plan, f"{plan.num_ranks}x{device}")


def agreed(plan: Plan, *, device: torch.device) -> Plan:
    """Rank 0's mixture, on every rank: blocks that differ would wait for each other forever, cut over ranks."""
    mixture = plan.activations.mixture
    if mixture is None or dist.get_world_size() == 1:
        return plan
    counts = torch.tensor(mixture, dtype=torch.int64, device=device)
    dist.broadcast(counts, src=0)
    full, selective = counts.tolist()
    return with_mixture(plan, (full, selective))


def _gpu_name() -> str:
    """Asked in a process of its own: a launcher that touches a GPU would hold memory on it for the whole training."""
    asked = subprocess.run([sys.executable, "-c", _ASK_NAME], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise PlanError(
            "the blocks of a budget cannot be chosen here: the GPU did not say its name",
            hint="name them: activations.mixture = [full, selective]; or use --device cpu",
        )
    return asked.stdout.strip()
