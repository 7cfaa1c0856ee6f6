"""The environment variables a local rank gets on top of elastic's own. Pure: the environment in, variables out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from weft.train.rank_environment import LAUNCHER_VARIABLE, SCRATCH_VARIABLE


def rank_variables(*, scratch: Path, num_ranks: int, given: Mapping[str, str], platform: str) -> dict[str, str]:
    """What every rank of a generation gets; a default never replaces what the user set."""
    defaults = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks))}
    if platform == "linux":
        # All ranks are on this machine, so no socket of theirs needs to be reachable from another.
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    wanted = {name: value for name, value in defaults.items() if name not in given}
    return {**wanted, SCRATCH_VARIABLE: str(scratch), LAUNCHER_VARIABLE: str(os.getpid())}


def num_cores() -> int:
    """Cores this process may use, which inside a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
