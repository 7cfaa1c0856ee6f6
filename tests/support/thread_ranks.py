"""Runs a TensorLayout on ranks that are threads of one process, and compares the sharded model with the full one.

Not a test, and not the engine: the plainest reading of a layout, so that a wrong layout shows whatever the engine does.
Logits and the gradient of every parameter are compared: a sharded one by its slice, one of `partial` as the sum over
ranks, any other as every rank has it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.tp.layout import LinearShards, Region, Segments, TensorLayout


class Ranks:
    """The meeting point of the threads: what each brings, everyone reads."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.brought = size, threading.Barrier(size, timeout=60), [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.barrier.wait()
        self.brought[rank] = value
        self.barrier.wait()
        return list(self.brought)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, rank: int) -> Tensor:
        ctx.at = ranks, rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ranks, rank = ctx.at
        return sum(ranks.exchange(rank, gradient)), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, rank: int) -> Tensor:
        return sum(ranks.exchange(rank, x.detach()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class _Gather(torch.autograd.Function):
    """Slices of the last dimension, in the order of the ranks; backward sums what the ranks did with each slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, rank: int, is_same_use: bool) -> Tensor:
        ctx.at, ctx.size, ctx.is_same_use = (ranks, rank), x.shape[-1], is_same_use
        return torch.cat(ranks.exchange(rank, x.detach()), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ranks, rank = ctx.at
        full = gradient if ctx.is_same_use else sum(ranks.exchange(rank, gradient))
        return full[..., rank * ctx.size : (rank + 1) * ctx.size], None, None, None


def taken(segments: Segments, rank: int, size: int) -> Tensor:
    """The features of a dimension that a rank holds."""
    found, begin = [], 0
    for segment in segments:
        count = max(segment.units // size, 1)
        if segment.units % size and not (segment.may_repeat and size % segment.units == 0):
            raise ValueError(f"{segment} on {size} ranks")
        first = rank * segment.units // size
        found.append(torch.arange(begin + first * segment.size, begin + (first + count) * segment.size))
        begin += segment.features
    return torch.cat(found)


def give_values(model: nn.Module, seed: int = 0) -> nn.Module:
    """Real parameters for a skeleton, in double precision and large: every part of a block matters. Ties are kept."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                value = value / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.3 * value
                made[id(parameter)] = nn.Parameter(value + (1.0 if parameter.dim() == 1 and key == "weight" else 0.0))
            module._parameters[key] = made[id(parameter)]
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"  # the grouped kernel knows no double precision
    return model.eval()


def differences(model: nn.Module, layout: TensorLayout, *, size: int = 2, tolerance: float = 2e-3) -> list[str]:
    """The differences between `model` (with values) and its sharded copies; empty if the layout is right."""
    ids = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(1))
    pull = torch.randn(2, 12, 1, generator=torch.Generator().manual_seed(2)).cos()
    full = copy.deepcopy(model)
    expected = _logits_and_gradients(full, ids, pull)
    ranks = Ranks(size)
    copies = [_shard(copy.deepcopy(model), layout, ranks, rank) for rank in range(size)]
    found = _in_threads(
        ranks, lambda rank: _logits_and_gradients(copies[rank], ids, pull, _made_whole(layout, ranks, rank))
    )
    lines = [f"logits: {error:.1e}" for error in [_error(found[0][0], expected[0])] if not error < tolerance]
    return lines + _gradient_differences(layout, model, expected[1], [one[1] for one in found], tolerance)


def _in_threads(ranks: Ranks, work: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * ranks.size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except threading.BrokenBarrierError:
            pass
        except Exception as error:  # shown below; the others must not wait
            errors.append(error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if any(result is None for result in results):
        raise RuntimeError("the ranks waited for each other in vain")
    return results


def _made_whole(layout: TensorLayout, ranks: Ranks, rank: int) -> Callable[[Tensor], Tensor]:
    """Slices of the logits are put together after the model: what it does to them after its head must not mind."""
    return lambda logits: logits if layout.head is None else _Gather.apply(logits, ranks, rank, True)


def _logits_and_gradients(
    model: nn.Module, ids: Tensor, pull: Tensor, made_whole: Callable[[Tensor], Tensor] = lambda logits: logits
) -> tuple[Tensor, dict[str, Tensor]]:
    logits = made_whole(model(input_ids=ids, use_cache=False).logits)
    weight = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(3))
    (logits.float() * pull * weight).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return logits.detach(), gradients


def _error(found: Tensor, expected: Tensor, least: float = 1e-12) -> float:
    """The largest difference against the largest value, or against `least`: some gradients are rounding only."""
    if expected.numel() == 0:
        return 0.0
    return (found - expected).abs().max().item() / max(expected.abs().max().item(), least)


def _gradient_differences(
    layout: TensorLayout,
    model: nn.Module,
    expected: dict[str, Tensor],
    found: list[dict[str, Tensor]],
    tolerance: float,
) -> list[str]:
    slices = _slices(layout, model)
    partial = {name for region in layout.regions for name in region.partial}
    norms = {norm.name for region in layout.regions for norm in region.wide_norms}
    least = 1e-3 * max(gradient.abs().max().item() for gradient in expected.values() if gradient.numel())
    lines, size = [], len(found)
    for name, gradient in expected.items():
        if any(name not in one for one in found):
            lines.append(f"{name}: no gradient")
            continue
        if name in slices:
            dim, segments = slices[name]
            total = torch.zeros_like(gradient)
            for rank, one in enumerate(found):
                total.index_add_(dim, taken(segments, rank, size), one[name])
            errors = [_error(total, gradient, least)]
        elif name in partial or name.rpartition(".")[0] in norms:
            errors = [_error(sum(one[name] for one in found), gradient, least)]
        else:
            errors = [_error(one[name], gradient, least) for one in found]
        if not max(errors) < tolerance:
            lines.append(f"{name}: gradient {max(errors):.1e}")
    return lines


def _slices(layout: TensorLayout, model: nn.Module) -> dict[str, tuple[int, Segments]]:
    """Canonical name -> (dimension, segments) of every sharded parameter; wide norms are replicated in the copies."""
    found: dict[str, tuple[int, Segments]] = {}
    for region in layout.regions:
        for linear in region.linears:
            is_column = linear.side == "column"
            dim = int(is_column) if linear.is_transposed else int(not is_column)
            found[f"{linear.name}.weight"] = dim, linear.outputs if is_column else linear.inputs
            if is_column and getattr(model.get_submodule(linear.name), "bias", None) is not None:
                found[f"{linear.name}.bias"] = 0, linear.outputs
        found |= {tensor.name: (tensor.dim, tensor.segments) for tensor in region.tensors}
    for end in filter(None, (layout.embedding, layout.head)):
        for key, parameter in model.get_submodule(end).named_parameters():
            found[f"{end}.{key}"] = 0, (_vocabulary(parameter.shape[0]),)
    return found


def _vocabulary(rows: int) -> Any:
    from weft.models.tp.layout import Segment

    return Segment(units=rows)


def _shard(model: nn.Module, layout: TensorLayout, ranks: Ranks, rank: int) -> nn.Module:
    """The copy of one rank: parameters sharded in place, hooks where regions begin and end."""
    done: dict[int, nn.Parameter] = {}
    for name, (dim, segments) in _slices(layout, model).items():
        owner, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        full = owner._parameters[key]
        if id(full) not in done:
            local = full.detach().index_select(dim, taken(segments, rank, ranks.size)).clone()
            done[id(full)] = done[id(local)] = nn.Parameter(local)
            done[-id(full)] = full  # keeps the id from being given to another
        owner._parameters[key] = done[id(full)]
        if hasattr(owner, "nf"):  # GPT-2's Conv1D shapes its output by it
            owner.nf = owner._parameters["weight"].shape[1]
    for region in layout.regions:
        _cut_region(model, region, ranks, rank)
    if layout.embedding is not None:
        _hook_embedding(model.get_submodule(layout.embedding), ranks, rank)
    if layout.head is not None:
        _hook_head(model.get_submodule(layout.head), ranks, rank)
    return model


def _cut_region(model: nn.Module, region: Region, ranks: Ranks, rank: int) -> None:
    for name in region.entries:
        model.get_submodule(name).register_forward_pre_hook(_entering(ranks, rank), with_kwargs=True)
    for linear in region.linears:
        if linear.side == "row":
            _hook_row(model.get_submodule(linear.name), linear, ranks, rank)
    if region.leaves_at is not None:
        model.get_submodule(region.leaves_at).register_forward_hook(
            lambda module, args, output: _Leave.apply(output, ranks, rank)
        )
    for norm in region.wide_norms:
        _hook_norm(model.get_submodule(norm.name), norm.segments, ranks, rank)
    for path, quantity in region.attributes.items():
        _set_attribute(model.get_submodule(region.name), path, _local(region, quantity, ranks.size))


def _entering(ranks: Ranks, rank: int) -> Callable[..., Any]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def one(value: Any) -> Any:
            is_entering = isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
            return _Enter.apply(value, ranks, rank) if is_entering else value

        return tuple(map(one, args)), {key: one(value) for key, value in kwargs.items()}

    return enter


def _hook_row(module: Any, linear: LinearShards, ranks: Ranks, rank: int) -> None:
    def forward(x: Tensor) -> Tensor:
        partial = x @ module.weight if linear.is_transposed else x @ module.weight.T
        total = _Leave.apply(partial, ranks, rank)
        return total if module.bias is None else total + module.bias

    module.forward = forward


def _hook_norm(module: Any, segments: Segments, ranks: Ranks, rank: int) -> None:
    mine, original = taken(segments, rank, ranks.size), module.forward
    every = [taken(segments, one, ranks.size) for one in range(ranks.size)]
    order = torch.cat(every)
    first = torch.tensor([int((order == feature).nonzero()[0]) for feature in range(int(order.max()) + 1)])

    def forward(x: Tensor) -> Tensor:
        gathered = _Gather.apply(x, ranks, rank, False)
        return original(gathered[..., first])[..., mine]

    module.forward = forward


def _hook_embedding(module: Any, ranks: Ranks, rank: int) -> None:
    rows, original = module.weight.shape[0], module.forward
    module.padding_idx = None

    def forward(ids: Tensor) -> Tensor:
        is_mine = (ids >= rank * rows) & (ids < (rank + 1) * rows)
        found = original(torch.where(is_mine, ids - rank * rows, 0))
        return _Leave.apply(found * is_mine[..., None], ranks, rank)

    module.forward = forward


def _hook_head(module: Any, ranks: Ranks, rank: int) -> None:
    module.register_forward_pre_hook(_entering(ranks, rank), with_kwargs=True)


def _local(region: Region, quantity: str, size: int) -> int:
    heads, kv_heads = region.heads.units // size, max(region.kv_heads.units // size, 1)
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "heads_per_kv": heads // kv_heads,
        "width": heads * region.heads.size,
        "kv_width": kv_heads * region.kv_heads.size,
    }[quantity]


def _set_attribute(module: Any, path: str, value: int) -> None:
    if path.startswith("config."):
        module.config = copy.copy(module.config)
        setattr(module.config, path.removeprefix("config."), value)
    else:
        setattr(module, path, value)
