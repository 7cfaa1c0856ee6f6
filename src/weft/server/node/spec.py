"""What every server of a job is told: how many they are, how steps are shared, when pulls wait."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    num_servers: int = 1
    shares: int = 1  # units of a step
    gate: int | None = None  # steps that a pull may be ahead of the oldest unfinished one; None: never waits
    discount: float = 0.0  # power of the discount for staleness beyond shares - 1
    merge: Literal["sum", "average"] = "sum"  # of exchanges
    durability: Literal["none", "process", "disk"] = "process"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
