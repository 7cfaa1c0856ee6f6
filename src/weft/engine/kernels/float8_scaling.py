"""`Scaling`: the recipe of one layer, and how tensor-parallel ranks divide its dimensions.

Dimensions are letters: M rows of activations, N outputs, K inputs; an operand is two of them, the contracted one last.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import TensorParallelError
from weft.core.float8 import BLOCKS
from weft.core.float8_section import Float8Recipe
from weft.core.shards import LocalShard
from weft.engine.kernels.float8_accuracy import LayerAccuracy
from weft.engine.kernels.float8_delayed import DelayedScale
from weft.engine.kernels.float8_operands import Operand, Role, Sharing, quantise_operand
from weft.engine.kernels.float8_products import multiply_operands
from weft.engine.tp.activation_layout import ActivationLayout
from weft.engine.tp.context import TPContext
from weft.engine.tp.grid import TP_GROUP

Factor = tuple[Tensor, str, Role]  # a matrix, its two dimensions, and what it is


@dataclass(frozen=True)
class Scaling:
    """`divided`: the dimension that the ranks of `group` divide; "" for none. `activations`: with sequence parallelism,
    where a layer that is not divided may have a slice of the sequence."""

    recipe: Float8Recipe = "tensorwise"
    group: dist.ProcessGroup | None = None
    divided: str = ""
    activations: ActivationLayout | None = None
    accuracy: LayerAccuracy | None = field(default=None, compare=False)
    delayed: DelayedScale | None = field(default=None, compare=False)

    def here(self) -> Scaling:
        """The scaling at this point of a forward."""
        if self.activations is None:
            return self
        divided = "M" if self.activations.now == "stream" else ""
        return replace(self, divided=divided, activations=None)

    @property
    def is_plain(self) -> bool:
        """Whether the layer fell back to unquantised products."""
        return self.accuracy is not None and self.accuracy.is_plain

    def sharing(self, dims: str) -> Sharing:
        """How the ranks share an operand."""
        rows, columns = dims[0], dims[1]
        return Sharing(
            self.group if self.divided in (rows, columns) else None,
            divides_rows=rows == self.divided,
            divides_columns=columns == self.divided,
        )

    def operand(self, factor: Factor) -> Operand:
        values, dims, role = factor
        return quantise_operand(values, self.recipe, role, self.sharing(dims))

    def multiply(self, left: Factor, right: Factor, dtype: torch.dtype) -> Tensor:
        """left @ right^T in this recipe."""
        if self.is_plain:
            return left[0] @ right[0].t()
        operands = self.operand(left), self.operand(right)
        for (values, _, role), operand in zip((left, right), operands, strict=True):
            self.compare(role, values, operand, rows=len(left[0]))
        return multiply_operands(*operands, self.recipe, dtype)

    def compare(self, role: Role, values: Tensor, operand: Operand, *, rows: int) -> None:
        """Add to the sums of a measured step. `rows`: rows that a weight multiplies."""
        if self.accuracy is not None:
            self.accuracy.add(role, values, operand, times=rows if role == "weight" else 1)


def scaling_of(name: str, recipe: Float8Recipe, tp: TPContext | None, *, dims: str = "NK") -> Scaling:
    """The scaling of a layer with the weight `name`, whose last dimensions are `dims`."""
    if tp is None:
        return Scaling(recipe)
    shard, group = tp.shards.get(name), tp.grid.group(TP_GROUP)
    if shard is None or not shard.is_sharded:
        has_slices = tp.activation_layout.sequence_parallel
        return Scaling(recipe, group, activations=tp.activation_layout) if has_slices else Scaling(recipe)
    first = len(shard.shape) - len(dims)
    for at, letter in enumerate(dims, start=first):
        if shard.shape[at] != shard.local_shape[at]:
            _require_whole_blocks(name, shard, recipe, at)
            return Scaling(recipe, group, letter)
    return Scaling(recipe)


def _require_whole_blocks(name: str, shard: LocalShard, recipe: Float8Recipe, at: int) -> None:
    """A block on two ranks would have two scales."""
    block = BLOCKS.get(recipe, 1)
    for chunk in shard.chunks:
        begin, size = chunk.offsets[at], chunk.sizes[at]
        if begin % block or (size % block and begin + size < shard.shape[at]):
            raise TensorParallelError(
                f"{name}: float8.recipe = {recipe!r} has a scale for {block} features, but a tensor-parallel rank "
                f"holds {size} of {shard.shape[at]}, from feature {begin} on",
                hint="choose a mesh.tp whose shards are whole blocks, or float8.recipe = 'rowwise'",
            )
