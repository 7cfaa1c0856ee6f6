"""The environment variables of a rank: those that torch elastic documents, and our own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weft.core.processes import num_cores
from weft.train.ranks.environment import LAUNCHER_VARIABLE, SCRATCH_VARIABLE, allocator_defaults

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup


def elastic_variables(worker: Worker, group: WorkerGroup, *, restart_count: int) -> dict[str, str]:
    """What torchrun sets for a rank."""
    spec = group.spec
    found = {
        "LOCAL_RANK": worker.local_rank,
        "RANK": worker.global_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": restart_count,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in found.items()}


def rank_variables(
    *, scratch: Path, num_ranks: int, given: Mapping[str, str], platform: str, interface: str | None = "lo"
) -> dict[str, str]:
    """The variables of every rank of a generation; a default never replaces a value of the user.

    `interface`: of the sockets between ranks; loopback while all ranks are on this machine, None leaves it open.
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks))}
    if platform == "linux" and interface is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    defaults |= allocator_defaults(given)
    wanted = {name: value for name, value in defaults.items() if name not in given}
    return {**wanted, SCRATCH_VARIABLE: str(scratch), LAUNCHER_VARIABLE: str(os.getpid())}
