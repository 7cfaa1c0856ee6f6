"""`DryRun`: memory and traffic of one rank in one step. No torch, so that views can import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.core.records import PeakRecord


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Memory and traffic of one rank in one step."""

    rank: int
    world_size: int
    peak: PeakRecord
    reserved_bytes: dict[str, int]  # the allocator's peak, with expandable segments and without
    moments: dict[str, int]  # peaks of other moments of a run
    traffic: list[dict[str, Any]]
    flops: int
    num_parameters: int
    elapsed_s: float
    notes: tuple[str, ...] = ()
    host_terms: dict[str, int] = field(default_factory=dict)  # offloaded bytes of the rank in the host's memory
    file_terms: dict[str, int] = field(default_factory=dict)  # and in files
    least_bytes: int | None = None  # the smallest capacity on which the allocator does not run out

    @property
    def peak_bytes(self) -> int:
        return self.peak.peak_bytes

    @property
    def terms(self) -> dict[str, int]:
        return self.peak.terms

    def as_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "memory": {
                **self.peak.as_dict(),
                "reserved_bytes": self.reserved_bytes,
                "least_bytes": self.least_bytes,
                "moments": self.moments,
            },
            "host": {"bytes_per_rank": sum(self.host_terms.values()), "terms": self.host_terms},
            "disk": {"bytes_per_rank": sum(self.file_terms.values()), "terms": self.file_terms},
            "traffic": self.traffic,
            "flops": self.flops,
            "parameters": self.num_parameters,
            "elapsed_s": self.elapsed_s,
            "notes": list(self.notes),
        }
