"""Mixtures of sources are verified as training draws them; a rank that draws them otherwise is caught."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chats import make_chats
from gloo_ranks import run_ranks
from verify_ranks import Tables, mutated_verdicts_in_rank, small_run, verdicts_of_many_in_rank

from weft.data.loader import Loader
from weft.data.mixture import MixtureOrder

ZERO_2 = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}}
TENSOR = {"mesh": {"tp": 2}}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}}
CASES: dict[str, tuple[Tables, Tables]] = {
    "by tokens, ZeRO-2": ({"weigh_by": "tokens"}, ZERO_2),
    "packed, tensor parallel": ({"packing": "documents", "truncation": "split"}, TENSOR),
    "isolated text, pipeline": ({"isolate_documents": True}, PIPELINE),
}


def mixed_run(corpus: Path, folder: Path, **data: Any) -> Tables:
    """Texts, and completions: the last answers of chats."""
    rows = folder / "answers.jsonl"
    turns = [[message["content"] for message in chat["messages"]][-2:] for chat in make_chats(40)]
    rows.write_text("".join(json.dumps({"prompt": asked, "completion": answer}) + "\n" for asked, answer in turns))
    run = small_run(str(corpus), data={"sequence_length": 32, **data})
    del run["data"]["source"]
    answers = {"source": str(rows), "format": "prompt-completion", "weight": 3.0}
    run["data"]["sources"] = [answers, {"source": str(corpus)}]
    return run


@pytest.mark.extended
def test_healthy_layouts_pass(corpus: Path, tmp_path: Path) -> None:
    cases = {name: (mixed_run(corpus, tmp_path, **data), plan) for name, (data, plan) in CASES.items()}
    (tmp_path / "scratch").mkdir()
    found = run_ranks(verdicts_of_many_in_rank, 2, cases, str(tmp_path / "scratch"), timeout_s=900)[0]
    assert {name: verdict["first_wrong"] for name, verdict in found.items() if not verdict["ok"]} == {}
    for verdict in found.values():
        details = {check["name"]: check["detail"] for check in verdict["checks"]}
        assert "2 sources in their shares" in details["oracle data"]
        assert "saved at step 2" in details["resume elsewhere"]


def _sources_the_other_way_round(self: MixtureOrder, samples: Any, original: Any) -> Any:
    owners, numbers = original(self, samples)
    return len(self.places) - 1 - owners, numbers


def _a_sample_late(self: MixtureOrder, samples: Any, original: Any) -> Any:
    return original(self, samples + 1)


@contextmanager
def _on_rank_1(draws: Any) -> Iterator[None]:
    """Other draws where the second rank reads."""
    original, batch = MixtureOrder.draws, Loader.batch

    def read(self: Loader, position: int) -> Any:
        changed = self.dp_rank == 1
        MixtureOrder.draws = (lambda own, samples: draws(own, samples, original)) if changed else original  # type: ignore[method-assign]
        try:
            return batch(self, position)
        finally:
            MixtureOrder.draws = original  # type: ignore[method-assign]

    Loader.batch = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        Loader.batch = batch  # type: ignore[method-assign]


def _planted_in_rank(rank: int, _world: int, run: Tables, plan: Tables, scratch: str) -> dict[str, Tables]:
    bugs = {bug.__name__: lambda bug=bug: _on_rank_1(bug) for bug in (_sources_the_other_way_round, _a_sample_late)}
    return mutated_verdicts_in_rank(rank, run, plan, scratch, bugs)


@pytest.mark.extended
def test_another_order_on_one_rank_is_caught(corpus: Path, tmp_path: Path) -> None:
    run = mixed_run(corpus, tmp_path)
    (tmp_path / "scratch").mkdir()
    found = run_ranks(_planted_in_rank, 2, run, ZERO_2, str(tmp_path / "scratch"), timeout_s=900)[0]
    assert {name: verdict["first_wrong"] for name, verdict in found.items() if not verdict["ok"]} == {
        "_sources_the_other_way_round": "data order", "_a_sample_late": "data order",
    }  # fmt: skip
