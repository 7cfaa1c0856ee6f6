"""The frozen base of an adapter in 8 or 4 bits: linear layers of the blocks store codes, and multiply by their values.

    weight ~ level[code] * scale      scale = max|group|, rounded to bfloat16
    int8   level = code / 127, codes -127 up to 127
    nf4    level = one of 16 quantiles of a normal distribution (QLoRA, arXiv:2305.14314, appendix E), two codes a byte

A layer keeps its class name and its parameter `weight`, which becomes [rows, bytes of a row] in uint8: rows of codes
and scales are sharded and gathered as rows of weights are. Only the codes are saved for the backward; the values of one
layer exist while it multiplies. Rounded values round to themselves, so a source of them gives every layout the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.adapter_spec import AdapterSpec
from weft.core.quantised_base import CODE_BITS, bytes_per_weight, group_of, is_stored_in_codes, row_bytes
from weft.models.adapter.targets import find_targets
from weft.models.initial import Reader, StoresBuffers, WeightSource
from weft.models.tp.roles import linear_facts

INT8_TOP = 127
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_BLOCK_NUMBERS = 4 * 1024 * 1024  # weights whose values are made at a time: float32 copies of a block bound the memory


@dataclass(frozen=True, kw_only=True)
class RowCodes:
    """How a rank's rows of a weight are stored: `columns` weights each, `group` of them with one scale."""

    kind: str
    columns: int
    group: int
    is_transposed: bool  # the weight is [inputs, outputs]

    @property
    def bits(self) -> int:
        return CODE_BITS[self.kind]

    @property
    def num_bytes(self) -> int:
        return row_bytes(self.columns, bits=self.bits, group=self.group)

    @property
    def code_bytes(self) -> int:
        return self.columns * self.bits // 8


def quantise_rows(weight: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] in uint8 and scales [rows, groups] in bfloat16, the nearest of each weight."""
    groups = weight.float().reshape(weight.shape[0], -1, group)
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    values = groups / scales.float()
    if kind == "int8":
        codes = (values * INT8_TOP).round().clamp(-INT8_TOP, INT8_TOP) + INT8_TOP
        return codes.to(torch.uint8).reshape(weight.shape), scales.squeeze(-1)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    codes = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
    return codes.to(torch.uint8).reshape(weight.shape), scales.squeeze(-1)


def values_of(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """The float32 weights [rows, columns] of codes and scales."""
    levels = _levels(kind, codes.device)[codes.int()]
    return (levels.reshape(*scales.shape, -1) * scales.float().unsqueeze(-1)).reshape(codes.shape)


def _levels(kind: str, device: torch.device) -> Tensor:
    if kind == "int8":
        # by a tensor: CUDA divides by a number as it multiplies by its reciprocal, which may be another last bit
        top = torch.full((), INT8_TOP, device=device, dtype=torch.float32)
        return torch.arange(-INT8_TOP, 256 - INT8_TOP, device=device, dtype=torch.float32) / top
    return torch.tensor(NF4_LEVELS, device=device)


def pack_rows(codes: Tensor, scales: Tensor, form: RowCodes) -> Tensor:
    """The stored rows [rows, bytes] of codes and scales."""
    if form.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return torch.cat([codes, scales.contiguous().view(torch.uint8)], dim=1)


def unpack_rows(stored: Tensor, form: RowCodes) -> tuple[Tensor, Tensor]:
    """Codes and scales of stored rows."""
    codes, scales = stored[:, : form.code_bytes], stored[:, form.code_bytes :].contiguous().view(torch.bfloat16)
    if form.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    return codes, scales


def dequantise(stored: Tensor, form: RowCodes, dtype: torch.dtype) -> Tensor:
    """The weights [rows, columns] of stored rows, a block of rows at a time."""
    made = torch.empty(stored.shape[0], form.columns, dtype=dtype, device=stored.device)
    block = max(1, _BLOCK_NUMBERS // form.columns)
    for begin in range(0, stored.shape[0], block):
        codes, scales = unpack_rows(stored[begin : begin + block], form)
        made[begin : begin + block] = values_of(codes, scales, form.kind)
    return made


def rounded(weight: Tensor, kind: str) -> Tensor:
    """A full weight as its codes have it, in float32."""
    codes, scales = quantise_rows(weight, kind, group_of(weight.shape[-1]))
    return values_of(codes, scales, kind)


class _CodedProduct(torch.autograd.Function):
    """x times the values of stored rows, whose codes alone are saved."""

    @staticmethod
    def forward(context: Any, x: Tensor, stored: Tensor, form: RowCodes) -> Tensor:
        context.save_for_backward(stored)
        context.form = form
        weight = dequantise(stored, form, x.dtype)
        return x @ weight if form.is_transposed else F.linear(x, weight)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (stored,) = context.saved_tensors
        weight = dequantise(stored, context.form, gradients[0].dtype)
        return gradients[0] @ (weight.T if context.form.is_transposed else weight), None, None


class Quantised:
    """Mixed into the class of a linear whose weight is stored in codes, once the engine has stored them."""

    weight: nn.Parameter
    bias: Tensor | None
    base_kind: str
    row_codes: RowCodes | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.row_codes is None:
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        made = self.product(x)
        return made if self.bias is None else made + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x times the weight, without the bias: a partial sum where inputs are sharded."""
        if self.row_codes is None:
            is_transposed = type(self).__name__ == "Conv1D"
            return x @ self.weight if is_transposed else F.linear(x, self.weight)
        return _CodedProduct.apply(x, self.weight, self.row_codes)  # type: ignore[no-any-return, no-untyped-call]


def mark_quantised(model: nn.Module, spec: AdapterSpec) -> None:
    """Make the frozen linears of the blocks layers whose weights the engine stores in codes."""
    for target in find_targets(model, ()) if spec.is_quantised else ():
        module: Any = target.module
        if module.weight.requires_grad or not is_stored_in_codes(module.weight.shape[-1]):
            continue
        module.__class__ = _quantised_class(module.__class__)
        module.base_kind = spec.base


@functools.cache
def _quantised_class(kind: Any) -> type[nn.Module]:
    """A subclass of the same name: what reads linears by class name still knows it."""
    made: type[nn.Module] = type(kind.__name__, (Quantised, kind), {"__module__": kind.__module__})
    return made


def quantised_linears(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of every linear that stores, or will store, codes."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Quantised))


def bytes_in_codes(module: nn.Module) -> float:
    """Bytes of each weight of a linear that will store codes; 0 of any other module."""
    return bytes_per_weight(module.weight.shape[-1], module.base_kind) if isinstance(module, Quantised) else 0.0


def codes_by_name(model: nn.Module) -> dict[str, RowCodes]:
    """The stored weights by parameter name."""
    return {
        f"{name}.weight": module.row_codes for name, module in quantised_linears(model) if module.row_codes is not None
    }


def full_shape(parameter: Tensor, codes: RowCodes | None) -> tuple[int, ...]:
    """The shape in weights of a parameter that may store codes."""
    return tuple(parameter.shape) if codes is None else (*parameter.shape[:-1], codes.columns)


def row_codes_of(name: str, module: Any, *, full_columns: int, edges: Collection[int]) -> RowCodes:
    """How a rank stores its columns of a weight; `edges`: first and last columns of its chunks, here and in full."""
    group = math.gcd(group_of(full_columns), *edges)
    facts = linear_facts(name, module)
    is_transposed = facts is not None and facts.is_transposed
    return RowCodes(kind=module.base_kind, columns=module.weight.shape[-1], group=group, is_transposed=is_transposed)


@dataclass(frozen=True)
class RoundedWeights:
    """A source whose weights in `kinds` have the values of their codes, in float32."""

    base: WeightSource
    kinds: Mapping[str, str] = field(default_factory=dict)  # by parameter name

    @property
    def by_rule(self) -> list[str]:
        return list(getattr(self.base, "by_rule", []))

    def buffer_names(self) -> list[str]:
        return self.base.buffer_names() if isinstance(self.base, StoresBuffers) else []

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Reader]]:
        for name, read in self.base.readers(names):
            kind = self.kinds.get(name)
            yield name, read if kind is None else _rounding(read, kind)


def _rounding(read: Reader, kind: str) -> Reader:
    def rows_of(index: tuple[slice, ...]) -> Tensor:
        made = rounded(read(index[:1]), kind)  # full rows: a slice of columns may divide a group
        return made[(slice(None), *index[1:])]

    return rows_of


def rounded_source(base: WeightSource, model: nn.Module) -> WeightSource:
    """`base` as the layers of `model` store it."""
    kinds = {f"{name}.weight": module.base_kind for name, module in quantised_linears(model)}
    return RoundedWeights(base, kinds) if kinds else base
