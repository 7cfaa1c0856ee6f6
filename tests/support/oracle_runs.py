"""Runs for the oracle's tests: one process, a few steps, the oracle's checks alone. Whatever is patched is patched."""

from __future__ import annotations

from pathlib import Path

import pytest
from verify_ranks import Tables, open_session, small_run

from weft.core.plan import Plan

STEPS = 3
RUNS: dict[str, Tables] = {
    "llama": {},
    "isolated": {"data": {"isolate_documents": True}},
    "one document": {"data": {"eval_fraction": 0.0}},
    "gpt2": {"model": "gpt2"},
    "qwen3-tied": {"model": "qwen3-tied"},
    "sgd": {"train": {"optimizer": "sgd"}},
    "schedule_free": {"train": {"optimizer": "schedule_free", "schedule": "constant"}},
    "mixture": {},
}


def oracle_run(corpus: Path, run: str) -> Tables:
    tables = small_run(str(corpus), **RUNS[run])
    if run == "mixture":  # of the first and the other texts: 00x, and 01x with more
        del tables["data"]["source"]
        texts = [{"source": f"{corpus}/00*.txt", "weight": 3.0}, {"source": f"{corpus}/0[1-9]*.txt"}]
        tables["data"] |= {"sources": texts, "weigh_by": "tokens", "eval_fraction": 0.3}
    return tables


def failed_checks(corpus: Path, scratch: Path, *, run: str = "llama", plan: Tables | None = None) -> dict[str, str]:
    """The checks that fail and what they say, in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(scratch / "cache"))
        with open_session(oracle_run(corpus, run), str(scratch), steps=STEPS) as session:
            checks = session.check_oracle(Plan.from_tables(plan or {}))
    assert len(checks) >= 4
    return {check.name: check.detail for check in checks if not check.ok}
