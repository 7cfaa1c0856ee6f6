"""`LaunchSettings`: names and limits of a cluster for `weft launch`. A frozen value; its printed form parses back.

What is launched is in run.toml and plan.toml; how many nodes and ranks, in the options of the verb.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from weft.core.config import Document, Section

_TIME = r"(?:\d+-)?\d{1,2}:\d{2}:\d{2}|\d+"


def _matches(pattern: str, what: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"is not {what}")
        return text

    return AfterValidator(check)


Line = Annotated[str, _matches(r"[^\n\r\0]*", "one line")]
Variable = Annotated[str, _matches(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")]


class _SiteSection(Section):
    model_config = ConfigDict(coerce_numbers_to_str=True)  # `time = 30`, `memory = 0`


class JobSettings(_SiteSection):
    """Every place."""

    python: Line = Field(default="", description="Python of the job; default: this one")
    environment: dict[Variable, Line] = Field(default={}, description="environment variables of all ranks")


class SlurmSettings(_SiteSection):
    partition: Line = Field(default="", description="--partition")
    account: Line = Field(default="", description="--account")
    qos: Line = Field(default="", description="--qos")
    constraint: Line = Field(default="", description="--constraint")
    time: Annotated[str, _matches(rf"|{_TIME}", "a time limit such as 04:00:00")] = Field(
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


class LaunchSettings(Document):
    """How a site runs jobs."""

    job: JobSettings = JobSettings()
    slurm: SlurmSettings = SlurmSettings()
