"""Check of float8 products by themselves: each kind of layer multiplies planted operands, whose scales are uneven.

A wrong scale is as small as rounding in a run's losses; here the products of the plan's shards have to be those of the
whole operands, rounded by the reference's own arithmetic. Collective: ranks that divide a layer agree about scales.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.float8_section import Float8
from weft.core.shards import LocalShard
from weft.engine.engine import Engine
from weft.engine.kernels.float8 import Float8Linear, scaled_product
from weft.engine.kernels.float8_experts import ExpertProducts
from weft.engine.kernels.float8_scaling import Scaling
from weft.verify.float8_reference import rounded
from weft.verify.verdict import Check, Finding

NAME, RULE = "float8 products", 6
ROWS = 136  # not a multiple of any block
ALLOWED = 5e-3  # of a product's norm: bfloat16 results and sums in another order; a wrong scale costs 2e-2 and more


def wrong_products(engine: Engine) -> list[str]:
    """Layers of this rank whose products are wrong, with the product and its error."""
    seen, wrong = set(), []
    for name, scaling, dims in _scaled(engine):
        shard = engine.shards.get(name)
        shape = shard.shape if shard is not None else engine.model.get_parameter(name).shape
        sizes = (shape[dims[0]], shape[dims[1]])
        if (sizes, scaling) not in seen and not scaling.is_plain:
            seen.add((sizes, scaling))
            errors = _errors(name, sizes, scaling, shard, dims=dims, device=engine.device)
            wrong += [f"{name}: {what} off by {error:.1e}" for what, error in errors if not error <= ALLOWED]
    return wrong


def differing_histories(engine: Engine) -> list[str]:
    """Layers whose delayed scales are not those of rank 0. Collective."""
    held: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(held, engine.float8.delayed_scalars())
    return [
        f"{name}: another amax history on rank {rank} than on rank 0"
        for rank, of_rank in enumerate(held)
        for name, history in of_rank.items()
        if history != held[0].get(name)
    ]


def _scaled(engine: Engine) -> Iterator[tuple[str, Scaling, tuple[int, int]]]:
    """Weights that multiply in float8, and the dimensions of their outputs and inputs."""
    for name, layer in engine.model.named_modules():
        if isinstance(layer, Float8Linear):
            yield f"{name}.weight", layer.scaling, (-2, -1)
        products = getattr(layer, "own_product", None)
        if isinstance(products, ExpertProducts):
            for key, scaling in products.scalings.items():
                yield f"{name}.{key}", scaling, (-1, -2) if products.is_transposed else (-2, -1)


def check_products(wrong: list[str], float8: Float8) -> list[Check]:
    """The check over the findings of all ranks; none for a plan without float8."""
    if float8.linears == float8.experts == "none":
        return []
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        finding = Finding(rule=RULE, expected=f"products of {float8.recipe} operands", found=f"{wrong[0]}{more}")
        return [Check.failed(NAME, finding)]
    return [Check.passed(NAME, f"{float8.recipe} scales are those of whole operands")]


def _errors(
    name: str,
    shape: tuple[int, int],
    scaling: Scaling,
    shard: LocalShard | None,
    *,
    dims: tuple[int, int] = (-2, -1),
    device: torch.device,
) -> Iterator[tuple[str, float]]:
    outputs, inputs = shape
    x, w, g = (_planted(f"{name}{at}", rows, columns).to(device) for at, (rows, columns) in enumerate(
        [(ROWS, inputs), (outputs, inputs), (ROWS, outputs)]
    ))  # fmt: skip
    n, k = (_places(shard, dim, size, device) for dim, size in zip(dims, shape, strict=True))
    rows, weight = x[:, k].requires_grad_(), w[n][:, k].requires_grad_()
    made = scaled_product(rows, weight, scaling)
    made.backward(g[:, n])  # type: ignore[no-untyped-call]
    recipe = scaling.recipe
    by_rows = rounded(g, recipe, is_gradient=True)[:, n] @ rounded(w.t(), recipe, is_weight=True)[k][:, n].t()
    by_weight = rounded(g.t(), recipe, is_gradient=True)[n] @ rounded(x.t(), recipe)[k].t()
    expected = rounded(x, recipe)[:, k] @ rounded(w, recipe, is_weight=True)[n][:, k].t()
    for what, found, right in (
        ("output", made, expected), ("gradient of the input", rows.grad, by_rows),
        ("gradient of the weight", weight.grad, by_weight),
    ):  # fmt: skip
        yield what, float((found.detach().float() - right).norm() / right.norm())  # type: ignore[union-attr]


def _planted(name: str, rows: int, columns: int) -> Tensor:
    """bfloat16 values whose magnitudes differ from row to row, from column to column and from block to block."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    spread = torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
    return (torch.randn(rows, columns, generator=generator) * (1.5 * spread).exp()).bfloat16()


def _places(shard: LocalShard | None, dim: int, size: int, device: torch.device) -> Tensor:
    """The global positions of this rank's features of a dimension, in local order."""
    if shard is None:
        return torch.arange(size, device=device)
    found = torch.empty(shard.local_shape[dim], dtype=torch.long, device=device)
    for chunk in shard.chunks:
        begin, local, length = chunk.offsets[dim], chunk.local_offsets[dim], chunk.sizes[dim]
        found[local : local + length] = torch.arange(begin, begin + length, device=device)
    return found
