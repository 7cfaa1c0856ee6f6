"""Sums and permutations of rows: the numbers of torch's own operators, and only indices are kept for the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.engine.ep.rows import add_rows, unsort_rows

ROWS, PAIRS, WIDTH = 5, 12, 8


def reference_sum(values: Tensor, row: Tensor) -> Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.zeros(ROWS, WIDTH, dtype=wide).index_add(0, row, values.to(wide)).to(values.dtype)


def gradient_of(function: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    leaf = values.clone().requires_grad_()
    made = function(leaf)
    made.backward(torch.linspace(-1, 1, made.numel()).view_as(made).to(made.dtype))
    assert leaf.grad is not None
    return made.detach(), leaf.grad


def saved_in(function: Callable[[], Tensor]) -> list[torch.dtype]:
    found: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: found.append(one.dtype) or one, lambda one: one):  # type: ignore[func-returns-value]
        function()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_and_their_gradients_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values, row = torch.randn(PAIRS, WIDTH, dtype=dtype), torch.randint(ROWS, (PAIRS,))
    found = gradient_of(lambda one: add_rows(one, row, ROWS), values)
    expected = gradient_of(lambda one: reference_sum(one, row), values)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_an_unsorted_tensor_and_its_gradient_are_those_of_torch() -> None:
    torch.manual_seed(0)
    values, order = torch.randn(PAIRS, WIDTH), torch.randperm(PAIRS)
    found = gradient_of(lambda one: unsort_rows(one, order), values)
    expected = gradient_of(lambda one: torch.zeros_like(one).index_copy(0, order, one), values)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(unsort_rows(values[order], order), values)


def test_only_indices_are_saved() -> None:
    values = torch.randn(PAIRS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    row, order = torch.randint(ROWS, (PAIRS,)), torch.randperm(PAIRS)
    assert saved_in(lambda: add_rows(values, row, ROWS)) == [torch.int64]
    assert saved_in(lambda: unsort_rows(values, order)) == [torch.int64]
