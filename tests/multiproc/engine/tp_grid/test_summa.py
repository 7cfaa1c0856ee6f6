"""Modes 2d and 2.5d against one process in float64: linears, the table, the head, the loss, and the bytes they move."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import run_ranks
from tensor_grids import bytes_on_the_wire, chunk, linear_reference, numbers, own, summed, whole_grid
from torch.testing import assert_close

from weft.engine.objective import token_loss_sum
from weft.engine.tp.cross_entropy import VocabularyLoss
from weft.engine.tp.grid import Grid
from weft.engine.tp_grid import summa
from weft.engine.tp_grid.embedding import logits_span, table_span, token_table

ROWS, LENGTH, INPUTS, OUTPUTS = 8, 3, 4, 6
# 2 x 2: chunks of 3 and 2, of 2 and 2, and one that leaves the second chunk empty
VOCABULARIES = (5, 4, 1)


def on_square(rank: int, world: int, mode: str) -> None:
    grid = whole_grid(mode)
    for is_transposed in (False, True):
        linear_case(grid, is_transposed=is_transposed)
    for vocabulary in VOCABULARIES:
        language_case(grid, vocabulary)
    half_case(grid)
    traffic_case(grid)


def rows_of(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    parts = grid.sizes.get("d", 1) * grid.sizes["i"]
    return chunk(x, 0, parts, grid.place.get("d", 0) * grid.sizes["i"] + grid.place["i"])


def linear_case(grid: Grid, *, is_transposed: bool) -> None:
    q, i, j = grid.sizes["i"], grid.place["i"], grid.place["j"]
    outputs_dim, inputs_dim = (1, 0) if is_transposed else (0, 1)
    full = linear_reference((ROWS, LENGTH, INPUTS), OUTPUTS, is_transposed=is_transposed)
    mine = [
        own(chunk(rows_of(grid, full.x), -1, q, j)),
        own(chunk(chunk(full.weight, outputs_dim, q, j), inputs_dim, q, i)),
        own(chunk(full.bias, 0, q, j)),
    ]
    found = summa.linear(mine[0], mine[1], mine[2], grid, is_transposed=is_transposed)
    assert_close(found, chunk(rows_of(grid, full.output), -1, q, j))
    found.backward(chunk(rows_of(grid, full.output_gradient), -1, q, j))
    assert_close(mine[0].grad, chunk(rows_of(grid, full.x.grad), -1, q, j))
    gradient = summed(mine[1].grad, grid.group("d")) if "d" in grid.groups else mine[1].grad
    assert_close(gradient, chunk(chunk(full.weight.grad, outputs_dim, q, j), inputs_dim, q, i))
    assert_close(summed(mine[2].grad, grid.group("di" if "d" in grid.sizes else "i")), chunk(full.bias.grad, 0, q, j))


def language_case(grid: Grid, vocabulary: int) -> None:
    """Tied: the same table at both ends, a vocabulary that does not divide, a padding token without gradient."""
    q, j = grid.sizes["i"], grid.place["j"]
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = torch.where(numbers(ROWS, LENGTH, seed=6) > 1.0, -100, ids.roll(1, 0))
    table, bias = numbers(vocabulary, INPUTS, seed=7), numbers(vocabulary, seed=8)
    whole, whole_bias = own(table), own(bias)
    hidden = F.embedding(ids, whole, padding_idx=0)
    logits = F.linear(hidden, whole, whole_bias)
    expected = token_loss_sum(logits, labels)
    expected.backward()

    tokens, shown = table_span(grid, vocabulary), logits_span(grid, vocabulary)
    mine = own(chunk(table[tokens.begin : tokens.begin + tokens.size], -1, q, j))
    mine_bias = own(bias[shown.begin : shown.begin + shown.size])
    found_hidden = token_table(rows_of(grid, ids), mine, grid=grid, vocabulary=vocabulary, padding_idx=0)
    assert_close(found_hidden, chunk(rows_of(grid, hidden), -1, q, j))
    found = summa.head(found_hidden, mine, mine_bias, grid, vocabulary=vocabulary)
    assert_close(found, rows_of(grid, logits)[..., shown.begin : shown.begin + shown.size])
    loss = VocabularyLoss(first_token=shown.begin, group=grid.group("j"))(found, rows_of(grid, labels))
    loss.backward()
    over_rows = grid.group("di" if "d" in grid.sizes else "i")
    assert_close(summed(loss.detach(), over_rows), expected.detach())
    gradient = summed(mine.grad, grid.group("d")) if "d" in grid.groups else mine.grad
    # the loss itself is float32
    part = whole.grad[tokens.begin : tokens.begin + tokens.size]
    assert_close(gradient, chunk(part, -1, q, j), rtol=1e-5, atol=1e-6)
    part = whole_bias.grad[shown.begin : shown.begin + shown.size]
    assert_close(summed(mine_bias.grad, over_rows), part, rtol=1e-5, atol=1e-6)


def half_case(grid: Grid) -> None:
    """bfloat16 stays bfloat16, and panels are summed in float32: a sum of q products has one rounding of its own."""
    q, i, j = grid.sizes["i"], grid.place["i"], grid.place["j"]
    x, weight = numbers(ROWS, INPUTS, seed=1).bfloat16(), numbers(OUTPUTS, INPUTS, seed=4).bfloat16()
    found = summa.linear(chunk(rows_of(grid, x), -1, q, j), chunk(chunk(weight, 0, q, j), 1, q, i), None, grid)
    assert found.dtype == torch.bfloat16
    panels = [chunk(x, -1, q, at) @ chunk(weight, 1, q, at).T for at in range(q)]
    expected = torch.stack([panel.float() for panel in panels]).sum(0).bfloat16()
    assert torch.equal(found, chunk(rows_of(grid, expected), -1, q, j))


def traffic_case(grid: Grid) -> None:
    """Forward: a row's activations and a column's weights once. Backward: both twice."""
    q = grid.sizes["i"]
    x, weight = own(numbers(4, 5, 6, seed=1)), own(numbers(7, 6, seed=2))
    moved = bytes_on_the_wire(grid, lambda: summa.linear(x, weight, None, grid))
    activations, weights = x.numel() * 8 * q, weight.numel() * 8 * q  # of q panels, each passed on once
    assert moved == {
        ("j", "broadcast", "forward"): activations,
        ("i", "broadcast", "forward"): weights,
        ("j", "broadcast", "backward"): activations,
        ("j", "reduce", "backward"): activations,
        ("i", "broadcast", "backward"): weights,
        ("i", "reduce", "backward"): weights,
    }


@pytest.mark.parametrize(("mode", "world"), [("2d", 4), ("2.5d", 8)])
def test_the_square_computes_what_one_process_does(mode: str, world: int) -> None:
    run_ranks(on_square, world, mode)
