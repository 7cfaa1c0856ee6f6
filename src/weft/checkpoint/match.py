"""Comparison of a checkpoint with the tensors to load, before any tensor changes.

DCP alone silently casts a float32 checkpoint to bfloat16 tensors and ignores unrequested keys. A rank may hold some of
the keys (a pipeline stage); a key of the checkpoint is extra only if no rank has it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from weft.checkpoint.exchange import Exchange
from weft.checkpoint.index import dtype_name
from weft.checkpoint.manifest import Manifest
from weft.checkpoint.parts import OF_ONE_RANK
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


def without_other_ranks(
    state: dict[str, Tensor], manifest: Manifest, exchange: Exchange
) -> tuple[dict[str, Tensor], Manifest, tuple[str, ...]]:
    """State and manifest as they are if tensors of single ranks fit on all ranks, else without them, and set to zero.
    The notes say so."""
    saved = {key for key in manifest.tensors if key.startswith(OF_ONE_RANK)}
    own = [key for key in state if key.startswith(OF_ONE_RANK)]
    fits = not any(_difference(key, state[key], manifest) for key in own)
    answers = exchange.all_gather((own, fits))
    wanted = {key for keys, _ in answers for key in keys}
    if saved == wanted and all(fits for _, fits in answers):
        return state, manifest, ()
    for key in own:
        state[key].zero_()
    state = {key: value for key, value in state.items() if key not in own}
    tensors = {key: value for key, value in manifest.tensors.items() if key not in saved}
    why = "of another layout" if saved and wanted else "not in this plan" if saved else "not in the checkpoint"
    note = f"errors of gradients sent before (data_parallel.error_feedback) are {why}: they start at zero"
    return state, replace(manifest, tensors=tensors), (note,)


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
