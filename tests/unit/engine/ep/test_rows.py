"""Rows in another order: outputs and gradients are those of plain indexing, whatever slots have a row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.engine.ep.rows import RowOrder, sorted_order, sum_rows, take_rows

WIDTH = 5


@st.composite
def keys(draw: st.DrawFn) -> Tensor:
    tokens, k = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    values = draw(st.lists(st.integers(-1, 5), min_size=tokens * k, max_size=tokens * k))
    return torch.tensor(values, dtype=torch.int64).view(tokens, k)


def order_of(given_keys: Tensor) -> RowOrder:
    return sorted_order(given_keys, int((given_keys >= 0).sum()))


@settings(max_examples=60, deadline=None)
@given(keys())
def test_rows_ascend_by_key_and_then_by_slot(given_keys: Tensor) -> None:
    order = order_of(given_keys)
    flat = given_keys.flatten().tolist()
    wanted = sorted((slot for slot, key in enumerate(flat) if key >= 0), key=lambda slot: (flat[slot], slot))
    assert order.slots.tolist() == wanted
    assert order.rows.flatten().tolist() == [wanted.index(slot) if key >= 0 else -1 for slot, key in enumerate(flat)]


@settings(max_examples=60, deadline=None)
@given(keys(), st.booleans())
def test_values_and_gradients_are_those_of_plain_indexing(given_keys: Tensor, has_weights: bool) -> None:
    order, generator = order_of(given_keys), torch.Generator().manual_seed(0)
    tokens, k = given_keys.shape
    hidden, pull = (torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    weights = torch.rand(tokens, k, dtype=torch.float64, generator=generator) if has_weights else None
    found = outcome(hidden, weights, pull, order, is_plain=False)
    wanted = outcome(hidden, weights, pull, order, is_plain=True)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-12, atol=1e-14)


def outcome(hidden: Tensor, weights: Tensor | None, pull: Tensor, order: RowOrder, *, is_plain: bool) -> list[Tensor]:
    """Take rows, a nonlinear function of each, their weighted sums: the output and the gradients."""
    hidden = hidden.clone().requires_grad_()
    weights = None if weights is None else weights.clone().requires_grad_()
    if is_plain:
        made = torch.tanh(hidden[order.tokens])
        scaled = made if weights is None else made * weights.flatten()[order.slots].unsqueeze(1)
        out = torch.zeros_like(hidden).index_add(0, order.tokens, scaled)
    else:
        out = sum_rows(torch.tanh(take_rows(hidden, order)), order, weights)
    (out * pull).sum().backward()
    given_inputs = [hidden] if weights is None else [hidden, weights]
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in given_inputs]
    return [out.detach(), *gradients]


def test_sums_of_half_precision_are_rounded_once() -> None:
    """256 + 64 x 1 in bfloat16: added one after the other, every 1 would be lost."""
    order = order_of(torch.zeros(1, 65, dtype=torch.int64))
    values = torch.ones(65, 1, dtype=torch.bfloat16)
    values[0] = 256
    assert float(sum_rows(values, order)) == 320
