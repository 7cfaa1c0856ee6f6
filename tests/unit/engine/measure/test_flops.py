"""Operations of products, also of the overloads that say the dtype of their output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.engine.measure.flops import FlopCounter

aten = torch.ops.aten
LEFT, RIGHT = torch.empty(3, 4), torch.empty(4, 5)
BATCH = [one.expand(2, *one.shape) for one in (LEFT, RIGHT)]


@pytest.mark.parametrize(
    ("operator", "arguments", "flops"),
    [
        (aten.mm.default, [LEFT, RIGHT], 2 * 3 * 4 * 5),
        (aten.mm.dtype, [LEFT, RIGHT, torch.float32], 2 * 3 * 4 * 5),
        (aten.addmm.dtype, [torch.empty(3, 5), LEFT, RIGHT, torch.float32], 2 * 3 * 4 * 5),
        (aten.bmm.dtype, [*BATCH, torch.float32], 2 * 2 * 3 * 4 * 5),
        (aten.baddbmm.dtype, [torch.empty(2, 3, 5), *BATCH, torch.float32], 2 * 2 * 3 * 4 * 5),
        (aten.add.Tensor, [LEFT, LEFT], 0),
    ],
)
def test_products_are_counted(operator: Any, arguments: list[Any], flops: int) -> None:
    counter = FlopCounter()
    counter.saw(operator, arguments, {}, LEFT)
    assert counter.total == flops
