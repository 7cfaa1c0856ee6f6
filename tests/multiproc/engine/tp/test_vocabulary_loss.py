"""The loss of a cut vocabulary against that of whole logits: uneven and empty slices, half precision, misuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_ranks import run_ranks
from torch.testing import assert_close

from weft.comm.observer import CollectiveObserver
from weft.core.shards import even_span
from weft.engine.kernels import head_loss
from weft.engine.kernels.head_loss import LazyLogits
from weft.engine.objective import token_loss_sum
from weft.engine.tp import cross_entropy
from weft.engine.tp.chunked_loss import HeadShard
from weft.engine.tp.cross_entropy import VocabularyLoss

ROWS, LENGTH = 4, 5
VOCABULARIES = (9, 8, 4, 2)  # over three ranks: 3 3 3, 3 3 2, 2 2 0, 1 1 0


def on_slices(rank: int, world: int) -> dict[str, int]:
    for vocabulary in VOCABULARIES:
        for dtype in (torch.float32, torch.bfloat16):
            compare(rank, world, vocabulary, dtype)
    misuse(rank, world)
    with CollectiveObserver() as seen:
        compare(rank, world, 9, torch.float32)
    cross_entropy.CHUNK_ELEMENTS = 12  # stretches of a few tokens, the last one shorter
    compare(rank, world, 9, torch.float32)
    return dict(seen.counts)


def on_stretches(rank: int, world: int) -> dict[str, int]:
    """The head with it: whatever a model does to its logits."""
    for vocabulary in VOCABULARIES:
        for change in CHANGES.values():
            compare_fused(rank, world, vocabulary, change)
    compare_fused(rank, world, 9, CHANGES["nothing"], dtype=torch.bfloat16)
    misuse_fused(rank, world)
    head_loss.CHUNK_ELEMENTS, head_loss._ROWS = 27, 1  # 9 rows of the largest slice: three stretches
    cross_entropy.CHUNK_ELEMENTS = 12  # and pieces of these
    compare_fused(rank, world, 8, CHANGES["a cap"])
    with CollectiveObserver() as seen:
        compare_fused(rank, world, 9, CHANGES["nothing"])
    return dict(seen.counts)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda logits: logits,
    "a scale": lambda logits: logits * 0.5,
    "a cap": lambda logits: torch.tanh(logits / 3.0) * 3.0,
}


def compare_fused(
    rank: int, world: int, vocabulary: int, change: Callable[[Any], Any], dtype: torch.dtype = torch.float32
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    hidden, weight, bias = (
        torch.randn(*size, generator=generator) for size in ((4, 5, 6), (vocabulary, 6), (vocabulary,))
    )
    labels = batch(vocabulary, dtype)[1]
    run = even_span(vocabulary, degree=world, place=rank)
    mine = slice(run.begin, run.begin + run.size)
    whole = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    own = [tensor.to(dtype).detach().clone().requires_grad_() for tensor in (hidden, weight[mine], bias[mine])]
    expected = token_loss_sum(change(F.linear(*whole)), labels)
    found = change(LazyLogits(*own, own=slice_of(rank, world, vocabulary))).loss_sum(labels)
    loose = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {}
    assert_close(found, expected, **loose)
    (expected * 0.25).backward()
    (found * 0.25).backward()
    for kept, (right, shard) in zip(own, zip(whole, (slice(None), mine, mine), strict=True), strict=True):
        assert right.grad is not None
        assert kept.grad is not None
        assert_close(kept.grad, right.grad[shard], **loose)
    with torch.no_grad():
        assert_close(
            change(LazyLogits(*own, own=slice_of(rank, world, vocabulary))).loss_sum(labels), expected, **loose
        )


def slice_of(rank: int, world: int, vocabulary: int) -> HeadShard:
    begin = even_span(vocabulary, degree=world, place=rank).begin
    return HeadShard(first_token=begin, most_tokens=-(-vocabulary // world), group=dist.group.WORLD)


def misuse_fused(rank: int, world: int) -> None:
    run = even_span(9, degree=world, place=rank)
    labels = batch(9, torch.float32)[1]
    for wrong in (9, -1):
        labels[-1, -1] = wrong
        late = LazyLogits(torch.ones(4, 5, 6), torch.ones(run.size, 6), None, own=slice_of(rank, world, 9))
        assert late.loss_sum(labels).isnan()


def batch(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    # far from zero: without the maximum the exponentials overflow
    logits = (torch.randn(ROWS, LENGTH, vocabulary, generator=generator) * 5 + 150).to(dtype)
    labels = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator)
    labels[0, :2] = -100
    return logits, labels


def compare(rank: int, world: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits, labels = batch(vocabulary, dtype)
    whole = logits.clone().requires_grad_()
    expected = token_loss_sum(whole, labels)
    (expected * 0.25).backward()
    run = even_span(vocabulary, degree=world, place=rank)
    mine = logits[..., run.begin : run.begin + run.size].clone().requires_grad_()
    found = VocabularyLoss(first_token=run.begin, group=dist.group.WORLD)(mine, labels)
    assert found.dtype == torch.float32
    assert_close(found, expected)
    (found * 0.25).backward()
    assert mine.grad is not None
    assert whole.grad is not None
    assert mine.grad.dtype == dtype
    assert_close(mine.grad, whole.grad[..., run.begin : run.begin + run.size])


def misuse(rank: int, world: int) -> None:
    """A label that is no token must not train quietly."""
    logits, labels = batch(9, torch.float32)
    run = even_span(9, degree=world, place=rank)
    for wrong in (9, -1):
        labels[-1, -1] = wrong
        mine = logits[..., run.begin : run.begin + run.size]
        assert VocabularyLoss(first_token=run.begin, group=dist.group.WORLD)(mine, labels).isnan()


def test_slices_of_the_vocabulary_give_the_whole_loss() -> None:
    found = run_ranks(on_slices, 3)
    assert found == [{"all_reduce": 2}] * 3


def test_a_fused_head_and_loss_in_slices_are_those_of_a_whole_head() -> None:
    # three stretches of two sums (one is of 7 numbers), with gradients and without; the input's gradient, once
    assert run_ranks(on_stretches, 3) == [{"small_all_reduce": 3 + 3, "all_reduce": 3 + 3 + 1}] * 3
