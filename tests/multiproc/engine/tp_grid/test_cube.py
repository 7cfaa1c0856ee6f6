"""Mode 3d against one process in float64: linears both ways, the table, the head, the loss, and the bytes they move."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gloo_ranks import run_ranks
from tensor_grids import bytes_on_the_wire, chunk, linear_reference, numbers, own, summed, whole_grid
from torch.testing import assert_close

from weft.engine.objective import token_loss_sum
from weft.engine.tp.cross_entropy import VocabularyLoss
from weft.engine.tp.grid import Grid
from weft.engine.tp_grid import cube
from weft.engine.tp_grid.embedding import logits_span, table_span, token_table

ROWS, LENGTH, INPUTS, OUTPUTS = 8, 3, 4, 8
# four chunks: 3 3 3 1, 2 2 1 0, 1 1 0 0 (a rank column without any logit), 2 2 2 2
VOCABULARIES = (10, 5, 2, 8)


def on_cube(rank: int, world: int) -> None:
    grid = whole_grid("3d")
    for way in ("pq", "qp"):
        for is_transposed in (False, True):
            linear_case(grid, way, is_transposed=is_transposed)
    for vocabulary in VOCABULARIES:
        language_case(grid, vocabulary)
    two_dimensions_case(grid)
    traffic_case(grid)


def laid(x: torch.Tensor, grid: Grid, layout: str) -> torch.Tensor:
    """The rank's block of whole activations: P has rows (i, j) and features k, Q rows (i, k) and features j."""
    row, feature = ("j", "k") if layout == "p" else ("k", "j")
    q = grid.sizes["i"]
    rows = chunk(x, 0, q * q, grid.place["i"] * q + grid.place[row])
    return chunk(rows, -1, q, grid.place[feature])


def stored_part(weight: torch.Tensor, grid: Grid, way: str, *, is_transposed: bool) -> torch.Tensor:
    inputs, outputs = ("k", "j") if way == "pq" else ("j", "k")
    q = grid.sizes["i"]
    outputs_dim, inputs_dim = (1, 0) if is_transposed else (0, 1)
    block = chunk(chunk(weight, outputs_dim, q, grid.place[outputs]), inputs_dim, q, grid.place[inputs])
    return chunk(block, outputs_dim, q, grid.place["i"])


def linear_case(grid: Grid, way: str, *, is_transposed: bool) -> None:
    linear = cube.linear_pq if way == "pq" else cube.linear_qp
    feature = "j" if way == "pq" else "k"
    full = linear_reference((ROWS, LENGTH, INPUTS), OUTPUTS, is_transposed=is_transposed)
    mine = [
        own(laid(full.x, grid, way[0])),
        own(stored_part(full.weight, grid, way, is_transposed=is_transposed)),
        own(chunk(full.bias, 0, grid.sizes["i"], grid.place[feature])),
    ]
    assert mine[1].numel() * 8 == full.weight.numel()
    found = linear(mine[0], mine[1], mine[2], grid, is_transposed=is_transposed)
    assert_close(found, laid(full.output, grid, way[1]))
    found.backward(laid(full.output_gradient, grid, way[1]))
    assert_close(mine[0].grad, laid(full.x.grad, grid, way[0]))
    assert_close(mine[1].grad, stored_part(full.weight.grad, grid, way, is_transposed=is_transposed))
    over_rows = grid.group("ik" if way == "pq" else "ij")
    assert_close(summed(mine[2].grad, over_rows), chunk(full.bias.grad, 0, grid.sizes["i"], grid.place[feature]))


def language_case(grid: Grid, vocabulary: int) -> None:
    """Tied, from ids in the rows of P to a loss in the rows of Q."""
    q = grid.sizes["i"]
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = torch.where(numbers(ROWS, LENGTH, seed=6) > 1.0, -100, ids.roll(1, 0))
    table = numbers(vocabulary, INPUTS, seed=7)
    whole = own(table)
    hidden = F.embedding(ids, whole, padding_idx=1)
    expected = token_loss_sum(F.linear(hidden, whole), labels)
    expected.backward()

    tokens, shown = table_span(grid, vocabulary), logits_span(grid, vocabulary)
    rows, k = slice(tokens.begin, tokens.begin + tokens.size), grid.place["k"]
    mine = own(chunk(table[rows], -1, q, k))
    own_ids = chunk(ids, 0, q * q, grid.place["i"] * q + grid.place["j"])
    found = token_table(own_ids, mine, grid=grid, vocabulary=vocabulary, padding_idx=1)
    assert_close(found, laid(hidden, grid, "p"))
    logits = cube.head(found, mine, None, grid, vocabulary=vocabulary)
    assert logits.shape[-1] == shown.size
    own_labels = chunk(labels, 0, q * q, grid.place["i"] * q + grid.place["k"])
    loss = VocabularyLoss(first_token=shown.begin, group=grid.group("j"))(logits, own_labels)
    loss.backward()
    assert_close(summed(loss.detach(), grid.group("ik")), expected.detach())
    assert_close(mine.grad, chunk(whole.grad[rows], -1, q, k), rtol=1e-5, atol=1e-6)  # the loss itself is float32


def two_dimensions_case(grid: Grid) -> None:
    x, weight = numbers(ROWS, INPUTS, seed=1), numbers(OUTPUTS, INPUTS, seed=4)
    found = cube.linear_pq(laid(x, grid, "p"), stored_part(weight, grid, "pq", is_transposed=False), None, grid)
    assert_close(found, laid(x @ weight.T, grid, "q"))


def traffic_case(grid: Grid) -> None:
    """Forward: each of the three faces once. Backward: inputs and weights twice, outputs once."""
    q = grid.sizes["i"]
    x, weight = own(numbers(2, 5, 6, seed=1)), own(numbers(7, 6, seed=2))
    moved = bytes_on_the_wire(grid, lambda: cube.linear_pq(x, weight, None, grid))
    inputs, weights = x.numel() * 8 * (q - 1), weight.numel() * 8 * (q - 1)
    outputs = 2 * 5 * (7 * q) * 8 * (q - 1)
    assert moved == {
        ("j", "all_gather", "forward"): inputs,
        ("i", "all_gather", "forward"): weights,
        ("k", "reduce_scatter", "forward"): outputs,
        ("k", "all_gather", "backward"): outputs,
        ("j", "all_gather", "backward"): inputs,
        ("j", "reduce_scatter", "backward"): inputs,
        ("i", "all_gather", "backward"): weights,
        ("i", "reduce_scatter", "backward"): weights,
    }


def test_the_cube_computes_what_one_process_does() -> None:
    run_ranks(on_cube, 8)
