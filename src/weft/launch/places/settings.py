"""`LaunchSettings`: names and limits of a cluster for `weft launch`. A frozen value; its printed form parses back.

What is launched is in run.toml and plan.toml; how many nodes and ranks, in the options of the verb.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from weft.core.config import Document
from weft.launch.places.kubernetes_settings import KubernetesSettings
from weft.launch.places.site import Line, SiteSection, Variable, matches

_TIME = r"(?:\d+-)?\d{1,2}:\d{2}:\d{2}|\d+"


class JobSettings(SiteSection):
    """Every place."""

    python: Line = Field(default="", description="Python of the job; default: this one, in Kubernetes `python`")
    environment: dict[Variable, Line] = Field(default={}, description="environment variables of all ranks")


class HostsSettings(SiteSection):
    """Over ssh."""

    list: Line = Field(default="", description="as --hosts: gpu1:8,gpu2:8, or a file")
    min_hosts: int = Field(default=0, ge=0, description="restarts may use fewer hosts, at least so many; 0: all")
    ssh_options: tuple[Line, ...] = Field(default=(), description="words for ssh, such as -F and a file")
    connect_timeout_s: float = Field(default=60.0, gt=0, description="seconds for a host to answer")
    lease_s: float = Field(
        default=8.0, ge=3, description="seconds of silence after which a host is lost, and its ranks end"
    )


class SlurmSettings(SiteSection):
    partition: Line = Field(default="", description="--partition")
    account: Line = Field(default="", description="--account")
    qos: Line = Field(default="", description="--qos")
    constraint: Line = Field(default="", description="--constraint")
    time: Annotated[str, matches(rf"|{_TIME}", "a time limit such as 04:00:00")] = Field(
        default="", description="--time: the limit of one start; the partition's if left out"
    )
    memory: Line = Field(default="", description="--mem of a node; '0' is all")
    cpus_per_rank: int = Field(default=1, ge=1, description="cores of a rank")
    gpu_type: Line = Field(default="", description="type in --gpus-per-node, such as h100")
    exclusive: bool = Field(default=False, description="--exclusive")
    requeue: bool = Field(default=True, description="queue the job again after a lost node or the time limit")
    signal_s: int = Field(default=120, ge=10, description="seconds before the time limit at which ranks save")
    log: Line = Field(default="", description="--output; default weft-%j.log, of arrays weft-%A_%a.log")
    setup: tuple[Line, ...] = Field(default=(), description="shell lines before the ranks, such as module load")
    options: tuple[Line, ...] = Field(default=(), description="further lines of #SBATCH, such as --mail-type=END")

    @model_validator(mode="after")
    def _options_are_options(self) -> SlurmSettings:
        for option in self.options:
            if not option.startswith("-"):
                raise ValueError(f"options: {option!r} does not begin with '-'")
        return self


class RaySettings(SiteSection):
    address: Line = Field(default="", description="of a Ray cluster, 'auto' or http://HEAD:8265; default: this machine")
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = Field(
        default="STRICT_SPREAD", description="how bundles, one per node of the job, are placed"
    )
    cpus_per_rank: int = Field(default=1, ge=1, description="cores of a rank")
    resources: dict[Line, float] = Field(default={}, description="further resources of each bundle")
    patience_s: float = Field(default=600.0, gt=0, description="seconds to wait for the placement group")


class LaunchSettings(Document):
    """How a site runs jobs."""

    job: JobSettings = JobSettings()
    hosts: HostsSettings = HostsSettings()
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    ray: RaySettings = RaySettings()
