"""Copies of a parameter must have equal bits in the forwards of a step; a difference is blamed on its rank."""

from __future__ import annotations

from typing import Any

import torch

from weft.core.shards import Chunk, LocalShard
from weft.verify.forward_weights import Copy, Seen, _parts, check_forward_weights
from weft.verify.verdict import Check

TABLE: Copy = ("embed.weight", "bfloat16", (0, 0), (8, 4))
HALF: Copy = ("mlp.weight", "bfloat16", (4, 0), (4, 4))


def check(*steps: list[Seen], never_flushes: bool = False) -> Check:
    return check_forward_weights(steps, never_flushes=never_flushes, describe_rank=lambda rank: f"rank {rank}")


def seen(copy: Copy, *digests: int, name: str = "") -> Seen:
    return {copy: (name or copy[0], list(digests))}


def test_equal_copies_pass_and_other_shards_are_no_copies() -> None:
    other: Any = (HALF[0], HALF[1], (0, 0), HALF[3])
    passed = check([seen(TABLE, 7, 7), {**seen(TABLE, 7), **seen(HALF, 1)}, seen(other, 2)])
    assert passed.ok
    assert passed.detail.startswith("3 tensors")


def test_a_copy_that_differs_is_blamed_on_its_rank_and_step() -> None:
    failed = check([seen(TABLE, 7), seen(TABLE, 7)], [seen(TABLE, 8), seen(TABLE, 9)])
    assert failed.finding is not None
    assert (failed.finding.step, failed.finding.parameter) == (2, "embed.weight")
    assert failed.detail.endswith("rank 1: expected the bits that rank 0 computes with, found other bits")


def test_a_tied_copy_is_named() -> None:
    failed = check([seen(TABLE, 7), seen(TABLE, 8, name="head.weight")])
    assert "head.weight, rank 1: expected the bits of its tied copy embed.weight that rank 0" in failed.detail


def test_weights_that_change_within_a_step_fail_but_where_updates_do_so() -> None:
    both = [seen(TABLE, 7, 8), seen(TABLE, 7, 8)]
    assert "equal bits in all forwards of a step" in check(both).detail
    assert check(both, never_flushes=True).ok
    assert not check([seen(TABLE, 7, 8), seen(TABLE, 8, 8)], never_flushes=True).ok
    assert check([seen(TABLE, 7, 8), seen(TABLE, 8, name="head.weight")], never_flushes=True).ok, "another stage"


def shard_at(offset: int) -> LocalShard:
    chunk = Chunk(offsets=(offset, 0), sizes=(4, 8), local_offsets=(0, 0))
    return LocalShard(shape=(8, 8), local_shape=(4, 8), chunks=(chunk,), axis_names=("tp",))


def test_codes_of_different_shards_are_no_copies_of_each_other() -> None:
    """Codes of a frozen base have another shape than the shard; of a shared scale all ranks have a copy."""
    codes, scale = torch.zeros(4, 5, dtype=torch.uint8), torch.ones(())
    first, second = (list(_parts(codes, shard_at(offset))) for offset in (0, 4))
    assert first[0][:2] != second[0][:2]
    assert first[0][2] is codes
    assert [one[:2] for one in _parts(scale, shard_at(0))] == [one[:2] for one in _parts(scale, shard_at(4))]
