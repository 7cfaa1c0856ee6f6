"""The MLP of each block, and whether it computes every position of a sequence alone, so that it can run in chunks.

A module is an MLP if its own children are the projections of one (the names of `models/tp/roles.py`). Whether it may be
divided by position is no list of families: MLPs of a small model with the same structure run whole and in two parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # no public form; a dry run's tensors have no values

from weft.models.cp.probe import FAILURES, Asked, small_model
from weft.models.layout import ModelLayout, find_blocks
from weft.models.tp.finder import blocks_of_text, text_tower
from weft.models.tp.roles import MLP_ROLES

OFF = "set activations.sequence_chunk = 0"
_LENGTH, _BORDER = 7, 3
_DIFFERENCE = 1e-6  # some activations compute in float32


def find_mlps(model: nn.Module, layout: ModelLayout) -> dict[str, tuple[str, ...]]:
    """Names of the MLPs in each block of the text."""
    return {block: tuple(_inside(model, block)) for block in _text_blocks(model, layout.blocks)}


def refusal(model: nn.Module, mlps: dict[str, tuple[str, ...]]) -> tuple[str, str] | None:
    """(sentence, hint) against `activations.sequence_chunk`, if the MLPs of `model` cannot run in chunks."""
    reason = why_not_chunked(model, mlps)
    sentence = f"the MLPs of {type(model).__name__} cannot run in chunks (activations.sequence_chunk): {reason}"
    return (sentence, OFF) if reason else None


def why_not_chunked(model: nn.Module, mlps: dict[str, tuple[str, ...]]) -> str:
    """Why the MLPs of `model` cannot run in chunks; "" if they can."""
    for block, names in mlps.items():
        if _has_experts(model.get_submodule(block)):
            return f"{block} is a mixture of experts, whose tokens are chosen over the whole micro-batch"
        if not names:
            return f"{block} has no module that holds its feed-forward layer alone"
    return _answer(Asked.of(model))


def _text_blocks(model: nn.Module, blocks: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return blocks_of_text(tuple(blocks), text_tower(model, blocks))


def _inside(model: nn.Module, block: str) -> Iterator[str]:
    for name, module in model.get_submodule(block).named_modules():
        if name and _is_mlp(module):
            yield f"{block}.{name}"


def _is_mlp(module: nn.Module) -> bool:
    return any(all(_is_linear(module._modules.get(name)) for name in (*columns, row)) for columns, row in MLP_ROLES)


def _is_linear(module: nn.Module | None) -> bool:
    weight = None if module is None else module._parameters.get("weight")
    return weight is not None and weight.ndim == 2


def _has_experts(block: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in block.named_modules())


@functools.lru_cache(maxsize=64)
def _answer(asked: Asked) -> str:
    try:
        with _disable_current_modes(), torch.no_grad():
            small = small_model(asked.model_class, asked.config)
            blocks = _text_blocks(small, find_blocks(small))
            names = (name for block in blocks for name in _inside(small, block))
            return next(filter(None, (_of_one(small.get_submodule(name), name) for name in names)), "")
    except FAILURES as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"its feed-forward layers could not be probed: {lines[0][:160]}"


def _of_one(module: nn.Module, name: str) -> str:
    width = _input_width(module)
    hidden = torch.randn(2, _LENGTH, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # some take further tensors of the same shape: a residual
    for others in ((), (hidden.flip(2),)):
        try:
            whole = module(hidden, *others)
        except TypeError as error:
            if "positional argument" not in str(error):
                raise
            continue
        parts = [module(*(each[:, part].contiguous() for each in (hidden, *others))) for part in _PARTS]
        if not all(isinstance(each, Tensor) for each in (whole, *parts)):
            return f"{name} returns more than its output"
        is_same = torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=_DIFFERENCE)
        return "" if is_same else f"{name} computes with several positions of the sequence"
    return f"{name} takes more than hidden states"


_PARTS = (slice(0, _BORDER), slice(_BORDER, _LENGTH))


def _input_width(module: nn.Module) -> int:
    """Features of the first projection: a linear's weight is [outputs, inputs], GPT-2's the other way."""
    for columns, row in MLP_ROLES:
        if all(_is_linear(module._modules.get(name)) for name in (*columns, row)):
            first = module._modules[columns[0]]
            return int(first.weight.shape[0 if hasattr(first, "nf") else 1])  # type: ignore[union-attr, index]
    raise LookupError("no projections")
