"""Attention in parts is attention in one piece: outputs, sums and gradients of every kernel that runs here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft.engine.cp.blocks as blocks
from weft.engine.cp.blocks import Seen, Softmax, Whole, attend, gradients
from weft.engine.cp.ring import _merged, _with_sinks
from weft.models.cp.softmax import softmax_attention

SCALE, QUERIES, KEYS = 0.3, 6, 10
BOUND = {torch.float64: 1e-13, torch.float32: 1e-5}


def tensors(dtype: torch.dtype, *, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, QUERIES, 8), (2, KEYS, 8), (2, KEYS, value_width))
    query, key, value = (torch.randn(2, *size, generator=generator, dtype=dtype) for size in sizes)
    return query, key, value


def masks() -> Tensor:
    """A query without keys in the first part, one without any."""
    mask = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[:, :, 2, :4], mask[0, 0, 3] = False, False
    return mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("value_width", [8, 12])  # other widths have no kernel of their own
@pytest.mark.parametrize("has_sinks", [False, True])
def test_parts_make_the_whole(dtype: torch.dtype, value_width: int, has_sinks: bool) -> None:
    query, key, value = (each.requires_grad_() for each in tensors(dtype, value_width=value_width))
    sinks = torch.linspace(-1.0, 1.0, 4, dtype=dtype) if has_sinks else None
    mask, spans = masks(), (slice(0, 4), slice(4, KEYS))
    parts = [attend(query, key[:, :, of], value[:, :, of], Seen(mask=mask[..., of]), scale=SCALE) for of in spans]
    found = _merged(*parts)
    assert found.log_sum[0, :, 3].isneginf().all()
    found = _with_sinks(found, sinks) if sinks is not None else found
    expected = softmax_attention(query, key, value, mask, scale=SCALE, sinks=sinks).transpose(1, 2).nan_to_num()
    assert (found.out - expected).abs().max() < BOUND[dtype]

    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=dtype)
    gradient[0, :, 3] = 0.0  # a query without keys is NaN in one piece
    allowed = mask.clone()
    allowed[0, 0, 3] = True
    one = softmax_attention(query, key, value, allowed, scale=SCALE, sinks=sinks).transpose(1, 2)
    right = torch.autograd.grad(one, (query, key, value), gradient)
    whole = Whole(found.out.detach().to(dtype), gradient, found.log_sum.detach())
    plain = [each.detach() for each in (query, key, value)]
    of_query = torch.zeros_like(query)
    for of in spans:
        args = (plain[0], plain[1][:, :, of], plain[2][:, :, of], Seen(mask=mask[..., of]), whole)
        part, of_keys, of_values = gradients(*args, scale=SCALE)
        of_query += part
        assert (of_keys - right[1][:, :, of]).abs().max() < 10 * BOUND[dtype]
        assert (of_values - right[2][:, :, of]).abs().max() < 10 * BOUND[dtype]
    assert (of_query - right[0]).abs().max() < 10 * BOUND[dtype]


@pytest.mark.parametrize("seen", [Seen(), Seen(is_triangle=True)])
def test_the_plain_kernel_is_the_fused_one(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(torch.float64, value_width=8)
    key, value = key[:, :, :QUERIES], value[:, :, :QUERIES]

    def both() -> tuple[Softmax, tuple[Tensor, Tensor, Tensor]]:
        found = attend(query, key, value, seen, scale=SCALE)
        return found, gradients(query, key, value, seen, Whole(found.out, query, found.log_sum + 1), scale=SCALE)

    fused = both()
    monkeypatch.setattr(blocks, "_kernel_of", lambda *_: "plain")
    for one, other in zip((*fused[0], *fused[1]), (*(plain := both())[0], *plain[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_sums_of_half_precision_are_in_float32() -> None:
    query, key, value = tensors(torch.bfloat16, value_width=8)
    found = attend(query, key, value, Seen(), scale=SCALE)
    assert found.out.dtype == found.log_sum.dtype == torch.float32
