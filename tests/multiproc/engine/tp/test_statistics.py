"""Norms over cut features against whole ones in float64: written out as transformers does, fused ones, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_ranks import run_ranks
from torch import Tensor, nn
from torch.testing import assert_close

from weft.core.errors import NotBuiltError
from weft.core.shards import even_span
from weft.engine.tp.statistics import spanning
from weft.engine.wrap_forward import wrap_forward

WIDTH = 8  # over three ranks: 3, 3 and 2


class Written(nn.Module):
    """A norm as a function of its input and weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).type_as(x)


def two_passes(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1).sqrt()


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "llama": lambda width: Written(llama, width),
    "gemma": lambda width: Written(gemma, width),
    "layer_norm": nn.LayerNorm,
    "layer_norm_plain": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "rms_norm": nn.RMSNorm,
    "rms_norm_eps": lambda width: nn.RMSNorm(width, eps=0.1),
    "var": lambda width: Written(two_passes, width),
    "std": lambda width: Written(lambda x, w: w * x / torch.std(x, dim=-1, correction=0, keepdim=True), width),
    "sum": lambda width: Written(lambda x, w: w * x / (1 + x.abs().sum(dim=-1, keepdim=True)), width),
    "norm": lambda width: Written(lambda x, w: w * x / x.norm(2, dim=-1, keepdim=True), width),
    "vector_norm": lambda width: Written(lambda x, w: w * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True), width),
    "normalize": lambda width: Written(lambda x, w: w * F.normalize(x, dim=-1), width),
}
REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, w: x.softmax(-1),
    "max": lambda x, w: w * x / x.max(-1, keepdim=True)[0],
    "amax": lambda x, w: w * x / x.amax(-1, keepdim=True),
    "view": lambda x, w: x.view(-1, 2).mean(-1),
    "mean over dimensions [0, 2]": lambda x, w: w * x.mean((0, 2), keepdim=True),
    "mean over dimensions [-1] of (2, 3, 1)": lambda x, w: w * x.mean(-1, keepdim=True).mean(-1, keepdim=True),
    "sum over dimensions []": lambda x, w: w * x.sum(),
    "shape": lambda x, w: w * x.sum(-1, keepdim=True) / x.shape[-1],
    "order 1": lambda x, w: w * x / x.norm(1, dim=-1, keepdim=True),
}


def on_slices(rank: int, world: int) -> None:
    for name, make in NORMS.items():
        compare(rank, world, make, name)
        repeated(rank, world, make, name)
    half(rank, world)
    for name, function in REFUSED.items():
        refused(name, function)


def compare(rank: int, world: int, make: Callable[[int], nn.Module], name: str) -> None:
    run = even_span(WIDTH, degree=world, place=rank)
    columns = slice(run.begin, run.begin + run.size)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 2
    up = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole, mine = make(WIDTH).double(), make(WIDTH).double()
    for parameter, own in zip(whole.parameters(), mine.parameters(), strict=True):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
        own.data = parameter.data[columns].clone()
    wrap_forward(mine, spanning(mine, dist.group.WORLD, WIDTH))
    inputs, own_inputs = x.clone().requires_grad_(), x[..., columns].clone().requires_grad_()
    expected, found = whole(inputs), mine(own_inputs)
    # the first two compute in float32
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if name in ("llama", "gemma") else {"rtol": 1e-12, "atol": 1e-12}
    assert_close(found, expected[..., columns], **tolerance, msg=lambda text: f"{name}: {text}")
    expected.backward(up)
    found.backward(up[..., columns])
    pairs = [(own_inputs, inputs), *zip(mine.parameters(), whole.parameters(), strict=True)]
    for own, parameter in pairs:
        assert own.grad is not None
        assert parameter.grad is not None
        assert_close(own.grad, parameter.grad[..., columns], **tolerance, msg=lambda text: f"{name}, gradient: {text}")


def repeated(rank: int, world: int, make: Callable[[int], nn.Module], name: str) -> None:
    """Every rank holds all features, and uses them for its own share of what follows (key-value heads, repeated)."""
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 2
    ups = torch.randn(world, 2, 3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole, mine = make(WIDTH).double(), make(WIDTH).double()
    wrap_forward(mine, spanning(mine, dist.group.WORLD, WIDTH, copies=world))
    inputs, own_inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = whole(inputs), mine(own_inputs)
    assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}, repeated: {text}")
    expected.backward(ups.sum(0))
    found.backward(ups[rank])
    assert own_inputs.grad is not None
    dist.all_reduce(own_inputs.grad)
    assert_close(own_inputs.grad, inputs.grad, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}, repeated: {text}")


def half(rank: int, world: int) -> None:
    """bfloat16 in and out; statistics in float32, as the fused norms have them."""
    run = even_span(WIDTH, degree=world, place=rank)
    columns = slice(run.begin, run.begin + run.size)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    for make in (nn.LayerNorm, nn.RMSNorm):
        whole, mine = make(WIDTH).bfloat16(), make(WIDTH).bfloat16()
        for own in mine.parameters():
            own.data = own.data[columns].clone()
        wrap_forward(mine, spanning(mine, dist.group.WORLD, WIDTH))
        found = mine(x[:, columns])
        assert found.dtype == torch.bfloat16
        assert_close(found, whole(x)[:, columns])


def refused(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    mine = Written(function, 4)
    wrap_forward(mine, spanning(mine, dist.group.WORLD, 12))
    with pytest.raises(NotBuiltError) as caught:
        mine(torch.ones(2, 3, 4))
    assert name in str(caught.value)


def test_norms_over_cut_features() -> None:
    run_ranks(on_slices, 3)
