"""The rank of this process and the rendezvous address, read from environment variables.

It reads the variables of weft's launcher and torchrun (RANK, ...), else those of Slurm's srun (SLURM_PROCID, ...), else
it returns a single rank. It opens no socket and imports no torch; `weft.train.ranks.process` joins the ranks.

    RANK present -> launcher or torchrun;  SLURM_PROCID present -> srun;  neither -> rank 0 of 1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.core.errors import InputError

# Set by weft's launcher for every rank: the folder for pid and error files, and the pid whose end ends the rank.
SCRATCH_VARIABLE = "WEFT_SCRATCH"
LAUNCHER_VARIABLE = "WEFT_LAUNCHER_PID"
# Set by the files of `weft launch`: the job of a cluster, and how many times the cluster has started it before.
JOB_VARIABLE = "WEFT_JOB"
ATTEMPT_VARIABLE = "WEFT_ATTEMPT"
MEMORY_FILES_VARIABLE = "WEFT_MEMORY_FILES"  # paths of the rank's memory files, which the launcher owns

Environment = Mapping[str, str]

# Settings of torch's allocator for GPUs, in the order in which torch 2.13 reads them; the first two are older names.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator_defaults(environment: Environment) -> dict[str, str]:
    """Segments that grow, against fragmentation; the dry run assumes them. Nothing if the user has set any of them."""
    is_set = any(name in environment for name in ALLOCATOR_VARIABLES)
    return {} if is_set else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True, kw_only=True)
class Process:
    """One rank: its number, its number on this host, the world size, restarts so far."""

    rank: int
    local_rank: int
    world_size: int
    restart_count: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address of the ranks' store, and whether torchrun's agent serves it."""

    address: str
    port: int
    served_by_agent: bool


def read_process(environment: Environment) -> Process:
    """The rank that the environment describes."""
    if "RANK" in environment:
        rank = _number(environment, "RANK")
        return _checked(
            rank=rank,
            local_rank=_number(environment, "LOCAL_RANK", default=rank),
            world_size=_number(environment, "WORLD_SIZE"),
            restart_count=_number(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
        )
    if _is_slurm_task(environment):
        return _checked(
            rank=_number(environment, "SLURM_PROCID"),
            local_rank=_number(environment, "SLURM_LOCALID"),
            world_size=_number(environment, "SLURM_NTASKS"),
            restart_count=_number(environment, "SLURM_RESTART_COUNT", default=0),
        )
    return Process(rank=0, local_rank=0, world_size=1, restart_count=0)


def given_ranks(environment: Environment) -> int | None:
    """The world size if torchrun, Slurm or a launcher started this process as a rank, else None."""
    if "RANK" in environment or _is_slurm_task(environment):
        return read_process(environment).world_size
    return None


def is_torchrun_rank(environment: Environment) -> bool:
    """Whether an agent of torch elastic, weft's or torchrun's, started this process as a rank."""
    return "RANK" in environment and "TORCHELASTIC_RUN_ID" in environment


def read_local_size(environment: Environment) -> int:
    """The number of ranks on this host."""
    if "RANK" in environment:
        return _number(environment, "LOCAL_WORLD_SIZE", default=read_process(environment).world_size)
    if _is_slurm_task(environment):
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_NTASKS", "1"))
        return int(re.match(r"\d+", per_node).group())  # type: ignore[union-attr]
    return 1


def read_rendezvous(environment: Environment, *, world_size: int) -> Rendezvous | None:
    """The rendezvous of the ranks; None for a process that was not started as a rank, or one rank without address."""
    address = environment.get("MASTER_ADDR")
    is_started_as_rank = "RANK" in environment or _is_slurm_task(environment)
    if not is_started_as_rank or (world_size == 1 and address is None):
        return None
    if address is None and _is_slurm_task(environment):
        address = first_slurm_host(environment.get("SLURM_JOB_NODELIST", ""))
    if address is None:
        raise InputError(
            f"The environment names {world_size} ranks, but MASTER_ADDR is not set.",
            hint="start the ranks with `weft train --nproc N` or torchrun, or set MASTER_ADDR and MASTER_PORT",
        )
    served_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Rendezvous(address=address, port=_port(environment), served_by_agent=served_by_agent)


def first_slurm_host(nodelist: str) -> str | None:
    """The first host of a Slurm list: `gpu[03-05,9],cpu1` gives `gpu03`. None for a more complex list."""
    match = re.match(r"([^\[\],]+)(?:\[([^\[\],-]+)[^\[\]]*\]([^\[\],]*))?(?:,|$)", nodelist)
    if match is None:
        return None
    return "".join(part or "" for part in match.groups())


def _is_slurm_task(environment: Environment) -> bool:
    # A batch script has SLURM_PROCID=0 too, but is no srun task: as rank 0 of many it would wait forever.
    in_batch_shell = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    return "SLURM_PROCID" in environment and not in_batch_shell


def _port(environment: Environment) -> int:
    if "MASTER_PORT" in environment or not _is_slurm_task(environment):
        return _number(environment, "MASTER_PORT")
    # The same port for all tasks of a step, below the kernel's range of ephemeral ports.
    job, step = _number(environment, "SLURM_JOB_ID", default=0), _number(environment, "SLURM_STEP_ID", default=0)
    return 20_000 + (31 * job + step) % 10_000


def _number(environment: Environment, name: str, *, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        problem = "is not set" if text is None else f"is {text!r}, not a number"
        raise InputError(
            f"The environment describes a rank, but {name} {problem}.",
            hint="start the ranks with `weft train --nproc N`, torchrun or srun, or unset RANK to run one rank",
        )
    return int(text)


def _checked(*, rank: int, local_rank: int, world_size: int, restart_count: int) -> Process:
    if rank >= world_size:
        raise InputError(
            f"The environment describes rank {rank} of {world_size} ranks; ranks count from 0.",
            hint="RANK must be below WORLD_SIZE (SLURM_PROCID below SLURM_NTASKS)",
        )
    return Process(rank=rank, local_rank=local_rank, world_size=world_size, restart_count=restart_count)
