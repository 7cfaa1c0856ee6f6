"""8-bit moments of the reference: torch's own AdamW, its moments rounded to 8 bits after every step.

The engine defines the moments that are rounded and their block size; torchao defines the codes. Nothing here is sharded
and no code is stored: a moment stays a float tensor that holds only representable values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from weft.engine.optim.adamw_8bit import CODES, SCALES, block_size_for

IS_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@torch.no_grad()
def round_moments(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Round both moments of every large parameter as if they had been stored in 8 bits and read back."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    for parameter in parameters:
        block = block_size_for(parameter.shape)
        if block is None or parameter not in optimizer.state:
            continue
        for key, is_signed in IS_SIGNED.items():
            moment = optimizer.state[parameter][key]
            scaled, scale = scale_tensor(moment.float(), block)
            codes = quantize_8bit_with_qmap(scaled, _code_values(is_signed))
            moment.copy_(_decoded(codes.view(moment.shape), scale, is_signed=is_signed))


def decode_moments(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's optimizer tensors, every pair of codes and scales decoded to its moment."""
    decoded = {key: value for key, value in state.items() if not key.endswith((CODES, SCALES))}
    for key in (key.removesuffix(CODES) for key in state if key.endswith(CODES)):
        is_signed = IS_SIGNED[key.rpartition(".")[2]]
        decoded[key] = _decoded(state[key + CODES], state[key + SCALES].flatten(), is_signed=is_signed)
    return decoded


def _decoded(codes: torch.Tensor, scale: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    values = _code_values(is_signed).to(codes.device)[codes.long()]
    return (values.view(scale.numel(), -1) * scale.view(-1, 1)).view(codes.shape)


@functools.cache
def _code_values(is_signed: bool) -> torch.Tensor:
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=is_signed), dtype=torch.float32)
