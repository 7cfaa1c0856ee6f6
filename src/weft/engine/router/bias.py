"""The bias that corrects the choice of experts, moved after each update: no gradient, no loss (DeepSeek-V3).

    bias += rate x sign(mean load - load)

It is part of the model: a persistent buffer, or a parameter without gradient. Checkpoints and exports have it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def move_bias(model: nn.Module, name: str, choices: Tensor, *, rate: float) -> None:
    """A no-op on ranks whose stages do not have the bias."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter = module._parameters.get(key)
    bias: Tensor | None = module._buffers.get(key) if parameter is None else parameter
    if bias is None or bias.is_meta:
        return
    move = (rate * torch.sign(choices.mean() - choices)).to(bias.dtype)
    if isinstance(bias, DTensor):
        move = move.view(bias.shape)
        bias.add_(distribute_tensor(move, bias.device_mesh, bias.placements, src_data_rank=None))
    else:
        bias.data.add_(move.view(bias.shape))
