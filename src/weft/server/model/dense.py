"""Dense parameters as rows of the table "dense": their flat vector in blocks of 1024, padded.

It neither pulls nor pushes rows: workers do, with those of the embeddings, in the same round trip. Order: that of
`model.parameters()`, without those that need no gradient; key = number of the block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from weft.core.errors import ModelError
from weft.core.table_spec import DENSE_BLOCK, DENSE_TABLE, RowInit, RowOptimizer, TableSpec
from weft.server.arrays import Keys, Rows


class DenseBlocks:
    """A view of one model; loading rows writes into its parameters."""

    def __init__(self, model: nn.Module) -> None:
        _require_trainable(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._num_elements = sum(parameter.numel() for parameter in self._parameters)
        self.keys: Keys = np.arange(-(-self._num_elements // DENSE_BLOCK), dtype=np.int64)

    def rows(self) -> Rows:
        return self._flattened([parameter.detach() for parameter in self._parameters])

    def gradients(self) -> Rows:
        """The gradients; zeros for a parameter that the loss does not depend on."""
        return self._flattened(
            [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in self._parameters
            ]
        )

    def clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def load(self, rows: Rows) -> None:
        flat = torch.from_numpy(np.ascontiguousarray(rows)).reshape(-1)
        start = 0
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()

    def _flattened(self, tensors: list[torch.Tensor]) -> Rows:
        rows = np.zeros((len(self.keys), DENSE_BLOCK), dtype=np.float32)
        if tensors:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            rows.reshape(-1)[: self._num_elements] = flat.numpy()
        return rows


def dense_spec(optimizer: RowOptimizer) -> TableSpec:
    return TableSpec(name=DENSE_TABLE, dim=DENSE_BLOCK, optimizer=optimizer, init=RowInit(kind="zeros"))


def _require_trainable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}; servers hold float32",
                hint="build the model in float32",
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            # Each worker would have its own statistics, and the evaluation none.
            raise ModelError(
                f"{name or 'the model'} keeps running statistics, which no server holds",
                hint="use LayerNorm, or track_running_stats=False",
            )
