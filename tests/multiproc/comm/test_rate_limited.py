"""On eight hosts with links of 40 Mbit/s each way, a star takes as many times a ring's time as its formula says."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from rate_limited_hosts import ranks_on, rate_limited_hosts

from weft.comm.algorithms.registry import ALGORITHMS

NUM_RANKS, MBIT = 8, 40


@pytest.mark.slow  # a minute or two; root, iproute2
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="namespaces need root and iproute2")
def test_star_against_ring_has_the_ratio_of_the_formulas() -> None:
    options = ["--algorithm", "ring,star", "--sizes", "2MiB", "--repeats", "3", "--json"]
    command = [sys.executable, "-m", "weft", "comm", "bench", *options, "--device", "cpu"]
    with rate_limited_hosts(NUM_RANKS, mbit=MBIT) as names:
        answer = json.loads(ranks_on(names, command, timeout_s=400)[0])
    rows = {row["algorithm"]: row for row in answer["rows"]}
    shares = {
        name: float(sum(path.share for path in ALGORITHMS["all_reduce"][name].path(NUM_RANKS, 1))) for name in rows
    }
    assert shares == {"ring": 14 / 8, "star": 14}
    ratio = rows["star"]["seconds"] / rows["ring"]["seconds"]
    print({name: row["seconds"] for name, row in rows.items()}, f"ratio {ratio:.2f}")
    assert ratio == pytest.approx(shares["star"] / shares["ring"], rel=0.15)
    for row in rows.values():
        assert row["equal"]
        assert row["bytes_sent_per_rank"] == row["predicted_bytes_per_rank"]
