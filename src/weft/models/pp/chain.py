"""Modules between blocks inside an nn.Sequential: activations, reshapes, layers that are not blocks.

A Sequential passes one tensor from module to module. So a module between two blocks belongs, with its parameters, to
the stage of the block before it, and later stages skip it like a block: there its input would be a placeholder's
output, whose shape may differ.
"""

from __future__ import annotations

from torch import nn

from weft.models.layout import ModelLayout


def beside_blocks(model: nn.Module, layout: ModelLayout) -> list[str]:
    """The names of these modules; none of them holds a block."""
    holders = dict.fromkeys(holder for block in layout.blocks for holder in _holders(block))
    found = []
    for holder in holders:
        module = model.get_submodule(holder)
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            names = [f"{holder}.{key}" if holder else key for key in module._modules]
            found += [name for name in names if name not in layout.blocks and name not in holders]
    return found


def _holders(block: str) -> list[str]:
    """Every module that contains a block, the model itself ("") first."""
    parts = block.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]
