"""Drawn combinations verified with ranks: a few of `benchmarks/verify_drawn.py`, and those that found defects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drawn import draw_case
from drawn_settled import settle, steps_of
from gloo_ranks import run_ranks
from samples import by_default
from verify_ranks import verdict_in_rank

from weft.verify.session import STAGES

CHATS = [{"prompt": f"thread {number} ", "completion": "is warp"} for number in range(300)]

# gather of cp beside float8 and codes; the others: fp16, buckets and codes; an average; chats and offload; experts
BY_DEFAULT = [11]
SLOW = [0, 1, 3, 6, 8, 12, 13, 14, 16, 17, 18, 20, 21, 25, 28, 31, 33, 37, 38, 39]


@pytest.mark.parametrize("seed", by_default(BY_DEFAULT, [*BY_DEFAULT, *SLOW]))
def test_a_drawn_combination_is_right(seed: int, corpus: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in CHATS), encoding="utf-8")
    settled = settle(draw_case(seed, str(corpus), str(chats), ranks=(2,)))
    assert not settled.wrong
    assert settled.legal is not None, settled.refusals[-1].message
    case = settled.legal
    arguments = (case.run, case.plan, str(tmp_path), steps_of(case), list(STAGES[:1]))
    verdict = run_ranks(verdict_in_rank, case.num_ranks, *arguments, timeout_s=600)[0]
    assert not [check for check in verdict["checks"] if not check["ok"]], case
