"""All-gathers the weights of float8 layers in float8: half the bytes, quantised per shard.

A tensor has one scale, from the largest magnitude of all shards: one small all-reduce before the first gather after an
update serves all weights (and one over tensor-parallel ranks). Shards are rounded to the compute dtype before they are
quantised, so they equal the quantised gathered weight, bit by bit.

The parameter that `fully_shard` then shows has a shape and takes a gradient, but no values: the layer has them in
float8. A layer whose weight the model's own code reads is excluded; an undetected one reads NaN.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from weft.comm.observer import wire_format
from weft.core.precision import PrecisionPolicy
from weft.engine.kernels.float8 import Float8Linear
from weft.engine.kernels.float8_accuracy import is_measuring
from weft.engine.kernels.float8_operands import E4M3, scale_of, whole_operand
from weft.engine.kernels.triton_here import has_triton
from weft.engine.precision import torch_dtype
from weft.models.module_sources import module_sources


def gather_in_float8(model: nn.Module, precision: PrecisionPolicy) -> Float8Gather | None:
    """Gather every suitable weight of a sharded `model` in float8 from the next gather on; None if there is none."""
    layers: dict[Tensor, list[Float8Linear]] = {}
    others: set[Tensor] = set()
    is_read = _reads_weights(model)
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear) and not is_read(name) and _is_evenly_sharded(module.weight):
            layers.setdefault(module.weight, []).append(module)
        else:
            others.update(module.parameters(recurse=False))
    found = {weight: sharers for weight, sharers in layers.items() if weight not in others}
    return Float8Gather(found, precision) if found else None


class Float8Gather:
    """The scales of all such weights, and the hooks that `fully_shard` calls before and after a gather."""

    def __init__(self, layers: dict[Tensor, list[Float8Linear]], precision: PrecisionPolicy) -> None:
        self._layers = list(layers.values())
        self._shards = [_shard(weight) for weight in layers]
        self._compute = torch_dtype(precision.weights)
        tensor = [layer.scaling.group for layer in itertools.chain(*self._layers) if layer.scaling.divided]
        self._groups = [_group(next(iter(layers))), *tensor[:1]]
        # every fourth float: cuBLAS takes only scales at addresses that are multiples of 16 bytes
        held = torch.ones(2, len(layers), 4, device=self._shards[0].device)
        self._scales, self._back = held[0, :, 0], held[1, :, 0]
        self._is_stale = True
        for index, shard in enumerate(self._shards):
            # fully_shard reads these attributes of the shard at its first use: its form of a custom all-gather
            shard.fsdp_pre_all_gather = functools.partial(self._before, index)  # type: ignore[attr-defined]
            shard.fsdp_post_all_gather = functools.partial(self._after, index)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._shards)

    def weights_may_change(self) -> None:
        """Call after each step and evaluation: until the next gather weights may be updated, loaded or set by hand."""
        self._is_stale = True

    @torch.no_grad()
    def _update_scales(self) -> None:
        largest = torch.stack(torch._foreach_norm(self._shards, float("inf"))).float()
        largest = largest.to(self._compute).float()
        with wire_format("scales", "float32"):  # no gradients
            for group in self._groups:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        self._scales.copy_(scale_of(largest, E4M3))
        self._back.copy_(self._scales.reciprocal())
        self._is_stale = False

    def _before(
        self, index: int, mesh: object, size: object, stride: object, module: object, policy: object
    ) -> tuple[tuple[Tensor], None]:
        if self._is_stale:
            self._update_scales()
        shard = self._shards[index]
        codes = quantise_shard(shard, self._scales[index], self._compute)
        for layer in self._layers[index] if is_measuring() else ():
            layer.scaling.compare("weight", shard.to(self._compute), whole_operand(codes, self._back[index]), rows=1)
        return (codes,), None

    def _after(
        self,
        index: int,
        gathered: Sequence[Tensor],
        metadata: object,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[_NoValues, tuple[()]] | None:
        # as for a parameter: else a compiled block holds each of these twice, once for the matmuls of its backward
        torch._dynamo.mark_static_address(gathered[0], guard=False)
        for layer in self._layers[index]:
            layer.gathered, layer.gathered_scale = gathered[0], self._back[index]
        return None if out is not None else (_NoValues(dtype, gathered[0].device), ())


class _NoValues:
    """Stands for the gathered weight when `fully_shard` shapes it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], _types: object, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is not torch.as_strided:
            raise NotImplementedError(f"{func} of a weight gathered in float8")
        held, size = args[0], args[1]
        return torch.full((), float("nan"), dtype=held.dtype, device=held.device).expand(size)


def quantise_shard(shard: Tensor, scale: Tensor, compute: torch.dtype) -> Tensor:
    """`shard` rounded to `compute`, times `scale`, in float8."""
    made: Tensor = torch.ops.weft.quantise_shard(shard, scale, compute)
    return made


@torch.library.custom_op("weft::quantise_shard", mutates_args=())
def _quantise_shard(shard: Tensor, scale: Tensor, compute: torch.dtype) -> Tensor:
    if shard.is_cuda and has_triton():
        from weft.engine.dp.float8_gather_triton import launch

        return launch(shard, scale, compute)
    most = torch.finfo(E4M3).max
    return (shard.to(compute).float() * scale).clamp(-most, most).to(E4M3)


@_quantise_shard.register_fake
def _(shard: Tensor, scale: Tensor, compute: torch.dtype) -> Tensor:
    return torch.empty_like(shard, dtype=E4M3)


def _shard(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        raise TypeError("the weight was not sharded")
    # the very tensor that fully_shard reads, which to_local() does not promise to return:
    # tests/multiproc/engine/test_float8_gather.py fails when it moves
    return weight._local_tensor


def _is_evenly_sharded(weight: Tensor) -> bool:
    """Else `fully_shard` pads, and replaces the shard by another tensor."""
    if not isinstance(weight, DTensor):
        return False
    axes = [at for at, placement in enumerate(weight.placements) if placement == Shard(0)]
    ranks = [weight.device_mesh.size(at) for at in axes]
    return len(axes) == 1 and ranks[0] > 1 and weight.shape[0] % ranks[0] == 0


def _group(weight: Tensor) -> dist.ProcessGroup:
    if not isinstance(weight, DTensor):
        raise TypeError("the weight was not sharded")
    return weight.device_mesh.get_group(weight.placements.index(Shard(0)))


def _reads_weights(model: nn.Module) -> Callable[[str], bool]:
    """Whether the model's code contains `<layer>.weight`: then it may read it; a call of the layer never does."""
    texts = module_sources((type(module) for module in model.modules()), without={Float8Linear.__module__})

    def is_read(name: str) -> bool:
        word = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\.weight\b")
        return texts is None or any(word.search(text) for text in texts)

    return is_read
