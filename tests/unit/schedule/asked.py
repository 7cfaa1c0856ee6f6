"""The pipeline requests that can be: all small ones, and a hypothesis strategy of larger ones. For tests only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from weft.schedule import NAMES, Schedule, check_request, generate


class Asked(NamedTuple):
    name: str
    p: int
    m: int
    v: int

    @property
    def counts(self) -> dict[str, int]:
        return {"num_ranks": self.p, "num_microbatches": self.m, "virtual_stages": self.v}

    @property
    def schedule(self) -> Schedule:
        return generate(self.name, **self.counts)


def all_requests(name: str, *, most_ranks: int = 8, most_microbatches: int = 16, most_stages: int = 4) -> list[Asked]:
    """Every request of the schedule within the bounds that is not refused."""
    asked = [
        Asked(name, p, m, v)
        for p in range(1, most_ranks + 1)
        for m in range(1, most_microbatches + 1)
        for v in range(1, most_stages + 1)
    ]
    return [one for one in asked if not check_request(name, **one.counts)]


def requests(names: Sequence[str] = NAMES) -> st.SearchStrategy[Asked]:
    """p in 1..12, m in 1..40, v in 1..5; refused requests are replaced by the nearest that are not."""

    def nearest(name: str, p: int, m: int, v: int) -> Asked:
        v = 2 if name in ("zbv", "dualpipev") else v if name in ("interleaved_1f1b", "looped_bfs") else 1
        m = max(m, {"dualpipev": 2 * p, "pipedream_2bw": p}.get(name, 1))
        if name == "interleaved_1f1b":
            m -= m % max(1, m // p)
        return Asked(name, p, m, v)

    return st.builds(nearest, st.sampled_from(names), st.integers(1, 12), st.integers(1, 40), st.integers(1, 5))
