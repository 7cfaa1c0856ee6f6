"""The job that a host is examined for: its ranks, and whether it spans hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Situation:
    """`num_ranks`: ranks per host, None if not given. `is_cluster`: judged as one of several hosts."""

    num_ranks: int | None = None
    is_cluster: bool = False
