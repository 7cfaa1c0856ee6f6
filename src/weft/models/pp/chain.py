"""Modules that stand in line with blocks inside an nn.Sequential: activations, reshapes, layers that are no blocks.

A Sequential hands each of its modules the one tensor that the one before gave. So what stands between two blocks is of
the stage of the block before, with whatever it has, and later stages pass it by like a block: what would reach it there
is a stand's output, whose shape need not be the block's.
"""

from __future__ import annotations

from torch import nn

from weft.models.layout import ModelLayout


def beside_blocks(model: nn.Module, layout: ModelLayout) -> list[str]:
    """Their names; none of them holds a block."""
    holders = dict.fromkeys(holder for block in layout.blocks for holder in _holders(block))
    found = []
    for holder in holders:
        module = model.get_submodule(holder)
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            names = [f"{holder}.{key}" if holder else key for key in module._modules]
            found += [name for name in names if name not in layout.blocks and name not in holders]
    return found


def _holders(block: str) -> list[str]:
    """Every module that a block is inside of, the model itself ("") first."""
    parts = block.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]
