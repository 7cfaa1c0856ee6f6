"""The table of published training runs (published_runs.toml) as frozen values. It judges nothing itself."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One run; the head of the TOML file says what each key means."""

    id: str
    source: str
    date: str
    framework: str
    devices: str
    tp: int
    pp: int
    dp: int
    zero: int
    micro_batch: int
    global_batch: int
    sequence_length: int
    recompute: str
    precision: str
    confirmed: bool = True
    model: str = ""
    type: str = ""
    config: Mapping[str, int] = field(default_factory=dict)
    dp_shard: int = 0
    cp: int = 1
    ep: int = 1
    schedule: str = ""
    virtual_stages: int = 1
    compile: bool = False
    attention: str = "fused"
    overlap: tuple[str, ...] = ()
    step_s: float | None = None
    derived: bool = False
    tokens_per_s_per_device: float | None = None
    tflops_per_device: float | None = None
    flops: str = ""
    mfu: float | None = None
    peak_memory_gib: float | None = None
    memory: str = ""
    assumed: tuple[str, ...] = ()
    note: str = ""

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def microbatches(self) -> int:
        """Micro-batches a rank runs in a step."""
        return self.global_batch // (self.dp * self.micro_batch)


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    return tuple(_run(table) for table in tomllib.loads(FILE.read_text(encoding="utf-8"))["run"])


def _run(table: Mapping[str, Any]) -> PublishedRun:
    return PublishedRun(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
