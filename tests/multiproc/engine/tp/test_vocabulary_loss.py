"""The loss of a cut vocabulary against that of whole logits: uneven and empty slices, half precision, misuse."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.testing import assert_close

from weft.comm.observer import CollectiveObserver
from weft.core.boxes import even_run
from weft.engine.objective import token_loss_sum
from weft.engine.tp import cross_entropy
from weft.engine.tp.cross_entropy import vocabulary_loss_sum

ROWS, LENGTH = 4, 5
VOCABULARIES = (9, 8, 4, 2)  # over three ranks: 3 3 3, 3 3 2, 2 2 0, 1 1 0


def on_slices(rank: int, world: int) -> dict[str, int]:
    for vocabulary in VOCABULARIES:
        for dtype in (torch.float32, torch.bfloat16):
            compare(rank, world, vocabulary, dtype)
    misuse(rank, world)
    with CollectiveObserver() as seen:
        compare(rank, world, 9, torch.float32)
    cross_entropy.STRETCH_ELEMENTS = 12  # stretches of a few tokens, the last one shorter
    compare(rank, world, 9, torch.float32)
    return dict(seen.counts)


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
    run = even_run(vocabulary, degree=world, place=rank)
    mine = logits[..., run.begin : run.begin + run.size].clone().requires_grad_()
    found = vocabulary_loss_sum(mine, labels, first_token=run.begin, group=dist.group.WORLD)
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
    run = even_run(9, degree=world, place=rank)
    for wrong in (9, -1):
        labels[-1, -1] = wrong
        mine = logits[..., run.begin : run.begin + run.size]
        assert vocabulary_loss_sum(mine, labels, first_token=run.begin, group=dist.group.WORLD).isnan()


def test_slices_of_the_vocabulary_give_the_whole_loss() -> None:
    found = run_ranks(on_slices, 3)
    assert found == [{"all_reduce": 2}] * 3
