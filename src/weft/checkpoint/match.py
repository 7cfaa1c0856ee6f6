"""Comparison of a checkpoint with the tensors to load, before any tensor changes.

DCP alone silently casts a float32 checkpoint to bfloat16 tensors and ignores unrequested keys. A rank may hold some of
the keys (a pipeline stage); a key of the checkpoint is extra only if no rank has it.
"""

from __future__ import annotations

from torch import Tensor

from weft.checkpoint.exchange import Exchange
from weft.checkpoint.index import dtype_name
from weft.checkpoint.manifest import Manifest
from weft.core.errors import CheckpointError


def require_match(state: dict[str, Tensor], manifest: Manifest, exchange: Exchange, *, name: str) -> None:
    """Raise the same error on every rank when the checkpoint and the state differ anywhere."""
    problems = [problem for of_rank in exchange.all_gather(_local_problems(state, manifest)) for problem in of_rank]
    keys = sorted(manifest.tensors)
    wanted = exchange.any_of_each([key in state for key in keys])
    problems += [
        f"{key!r} is in the checkpoint and not in the model"
        for key, is_wanted in zip(keys, wanted, strict=True)
        if not is_wanted
    ]
    distinct = list(dict.fromkeys(problems))
    if distinct:
        raise CheckpointError(
            f"{name} does not fit the model: {distinct[0]} ({len(distinct)} such {_plural(len(distinct))}).",
            hint="Resume with the model, optimizer and precision that the run was started with.",
        )


def _local_problems(state: dict[str, Tensor], manifest: Manifest) -> list[str]:
    found = (_difference(key, tensor, manifest) for key, tensor in sorted(state.items()))
    return [problem for problem in found if problem]


def _difference(key: str, tensor: Tensor, manifest: Manifest) -> str:
    saved = manifest.tensors.get(key)
    if saved is None:
        return f"{key!r} is in the model and not in the checkpoint"
    if saved.shape != tuple(tensor.shape):
        return f"{key!r} has shape {list(saved.shape)} in the checkpoint and {list(tensor.shape)} in the model"
    if saved.dtype != dtype_name(tensor.dtype):
        return f"{key!r} is {saved.dtype} in the checkpoint and {dtype_name(tensor.dtype)} in the model"
    return ""


def _plural(count: int) -> str:
    return "difference" if count == 1 else "differences"
