"""Options that several verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DeviceChoice(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


RunFile = Annotated[Path | None, typer.Argument(help="run.toml; without it, the embedded default.")]
RunOrModel = Annotated[
    str | None, typer.Argument(help="run.toml, or a model as weft plan takes it; without, the embedded default.")
]
NumRanks = Annotated[int | None, typer.Option(min=1, help="Ranks to start on this machine.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value of run.toml or plan.toml; may be repeated.")
]
