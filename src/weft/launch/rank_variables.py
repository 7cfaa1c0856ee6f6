"""The environment variables of a local rank in addition to those of elastic. A pure function of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from weft.core.processes import num_cores
from weft.train.ranks.environment import LAUNCHER_VARIABLE, SCRATCH_VARIABLE, allocator_defaults


def rank_variables(*, scratch: Path, num_ranks: int, given: Mapping[str, str], platform: str) -> dict[str, str]:
    """The variables of every rank of a generation; a default never replaces a value of the user."""
    defaults = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks))}
    if platform == "linux":
        # All ranks are on this machine, so their sockets need not be reachable from another.
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    defaults |= allocator_defaults(given)
    wanted = {name: value for name, value in defaults.items() if name not in given}
    return {**wanted, SCRATCH_VARIABLE: str(scratch), LAUNCHER_VARIABLE: str(os.getpid())}
