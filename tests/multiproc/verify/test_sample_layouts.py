"""Chats, completions and packed documents under every kind of layout: verified, and planted bugs of one rank caught."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chats import make_chat_tokenizer, make_chats
from gloo_ranks import run_ranks
from samples import by_default
from verify_ranks import Tables, mutated_verdicts_in_rank, small_run, verdicts_of_many_in_rank

from weft.data.loader import Loader

# name -> model, data, plan
CASES: dict[str, tuple[str, Tables, Tables]] = {
    "chats, tensor parallel": ("llama", {"packing": "documents"}, {"mesh": {"tp": 2}}),
    "chats, ZeRO-3": (
        "gpt2",
        {"packing": "none"},
        {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}},
    ),
    "chats, pipeline": (
        "qwen3-tied",
        {"packing": "documents"},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
    ),
    "chats, experts": (
        "mixtral",
        {"packing": "documents"},
        {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}},
    ),
    "text, DDP": ("llama", {"format": "text", "packing": "documents"}, {"mesh": {"dp_replicate": 2}}),
    "text, dropout, DDP": (
        "gpt2",
        {"format": "text", "packing": "documents"},
        {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}},
    ),
    "text, dropout, stream": (
        "gpt2",
        {"format": "text", "packing": "concatenate", "truncation": None, "isolate_documents": True},
        {"mesh": {"dp_replicate": 2}},
    ),
}


def chat_data(folder: Path) -> Tables:
    tokenizer = make_chat_tokenizer(folder / "tokenizer", "chatml", has_marks=True)
    rows = folder / "chats.jsonl"
    rows.write_text(
        "".join(json.dumps({**chat, "text": chat["messages"][-1]["content"]}) + "\n" for chat in make_chats(40))
    )
    return {
        "source": str(rows),
        "tokenizer": str(tokenizer),
        "format": "chat",
        "truncation": "start",
        "sequence_length": 32,
    }


SHARES = {
    "chats": ("chats, tensor parallel", "chats, ZeRO-3"),
    "others": tuple(CASES)[2:5],
    "dropout": tuple(CASES)[5:6],
    "stream": tuple(CASES)[6:],
}


@pytest.mark.parametrize("share", by_default([], SHARES, extended=["chats"]))
def test_healthy_layouts_pass(share: str, tmp_path: Path) -> None:
    given = chat_data(tmp_path)
    cases = {
        name: (small_run(given["source"], model=model, data={**given, **data}), plan)
        for name, (model, data, plan) in CASES.items()
        if name in SHARES[share]
    }
    (tmp_path / "scratch").mkdir()
    found = run_ranks(verdicts_of_many_in_rank, 2, cases, str(tmp_path / "scratch"), timeout_s=900)[0]
    assert {name: verdict["first_wrong"] for name, verdict in found.items() if not verdict["ok"]} == {}
    for name, verdict in found.items():
        details = {check["name"]: check["detail"] for check in verdict["checks"]}
        what = "row" if name.endswith("stream") else "sample"
        assert f"every {what} of an epoch once" in details["oracle data"]
        assert ("rendered again" in details["oracle data"]) == name.startswith("chats")


def _on_rank_1(change: Any) -> Any:
    """A mutation of the batches of the second rank alone."""

    @contextmanager
    def mutation() -> Iterator[None]:
        original = Loader.batch

        def batch(self: Loader, position: int) -> Any:
            made = original(self, position)
            if self.dp_rank == 1:
                change(made)
            return made

        Loader.batch = batch  # type: ignore[method-assign]
        try:
            yield
        finally:
            Loader.batch = original  # type: ignore[method-assign]

    return mutation


def _prompts_count(batch: Any) -> None:
    batch["labels"][:, :-1] = batch["input_ids"][:, 1:]


def _positions_run_through(batch: Any) -> None:
    batch["position_ids"] = (batch["position_ids"] * 0).cumsum(1) + batch["position_ids"].new_tensor(range(96))


def _labels_of_other_rows(batch: Any) -> None:
    batch["labels"][:] = batch["labels"].roll(1, 0)


def _planted_in_rank(rank: int, _world: int, run: Tables, plan: Tables, scratch: str) -> dict[str, Tables]:
    bugs = {bug.__name__: _on_rank_1(bug) for bug in (_prompts_count, _positions_run_through, _labels_of_other_rows)}
    return mutated_verdicts_in_rank(rank, run, plan, scratch, bugs)


@pytest.mark.extended
def test_bugs_of_one_rank_are_caught(tmp_path: Path) -> None:
    given = {**chat_data(tmp_path), "packing": "documents", "sequence_length": 96}
    run = small_run(given["source"], data=given)
    (tmp_path / "scratch").mkdir()
    plan = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}}
    found = run_ranks(_planted_in_rank, 2, run, plan, str(tmp_path / "scratch"), timeout_s=900)[0]
    assert {name for name, verdict in found.items() if verdict["ok"]} == {""}
