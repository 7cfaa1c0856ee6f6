"""Likely causes of a difference between a script's ranks and one process, in a sentence each.

g_N = a g_1, a = N: a sum over ranks, not divided;   a = 1/N: divided twice
ranks differ, their mean is right: no all-reduce     ranks differ before the first step: weights not broadcast
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from weft.verify.checks import distance_of, norm_of
from weft.verify.script.trace import ScriptRun, Tensors

_SAME_DIRECTION = 1e-3  # of the norm: gradients that differ by one factor alone


def gradient_cause(reference: Tensors, found: Tensors, run: ScriptRun) -> str | None:
    """Why full gradients differ from those of one process, on all ranks alike."""
    names = [name for name in reference if name in found and reference[name].shape == found[name].shape]
    inner = sum(float((reference[name].double() * found[name].double()).sum()) for name in names)
    size = sum(norm_of(reference[name]) ** 2 for name in names)
    if not size or not math.isfinite(inner):
        return None
    factor, ranks = inner / size, len(run.ranks)
    rest = sum(distance_of(found[name].double(), reference[name].double() * factor) ** 2 for name in names)
    if math.sqrt(rest / size) > _SAME_DIRECTION * max(1.0, abs(factor)):
        return uneven_cause(run)
    if math.isclose(factor, ranks, rel_tol=1e-2):
        return f"gradients are {ranks} times those of one process: summed over {ranks} ranks, never divided by {ranks}"
    if math.isclose(factor, 1 / ranks, rel_tol=1e-2):
        return (
            f"gradients are 1/{ranks} of those of one process: averaged twice, as by a loss divided by the number of "
            "ranks under DDP or fully_shard, which divide too"
        )
    if math.isclose(factor, 1.0, rel_tol=1e-2):
        return None
    return (
        f"all gradients are {factor:.4g} times those of one process: a loss divided by a number that depends on ranks"
    )


def uneven_cause(run: ScriptRun) -> str:
    """Why losses or gradients differ although rows and weights are the same."""
    if run.main.has_batch_norm:
        return "batch norms take statistics of each rank's rows alone: convert them with SyncBatchNorm"
    return (
        "a mean over each rank's own tokens or rows while ranks have different numbers of them; or a parameter whose "
        "gradient is not reduced"
    )


def disagreement_cause(run: ScriptRun, reference: ScriptRun, *, step: int) -> str:
    """Why gradients of ranks differ from one another; those of the first step are known in full."""
    if step == 1 and len(run.gradients) == len(run.ranks):
        names = reference.gradients[0]
        shapes = all(
            each.get(name, torch.empty(0)).shape == names[name].shape for each in run.gradients for name in names
        )
        if shapes and names:
            total = math.sqrt(sum(norm_of(value) ** 2 for value in names.values()))
            gap = math.sqrt(sum(distance_of(_mean(run.gradients, name), names[name]) ** 2 for name in names))
            if gap <= _SAME_DIRECTION * total:
                return (
                    "the mean over ranks is the gradient of one process: an all-reduce is missing (no DDP, or no_sync)"
                )
    return "gradients are not reduced over ranks in this step (no_sync), or ranks have different weights"


def _mean(gradients: Sequence[Tensors], name: str) -> torch.Tensor:
    return sum((each[name].double() for each in gradients), start=torch.zeros((), dtype=torch.float64)) / len(gradients)


def sample_cause(reference: ScriptRun, found: ScriptRun) -> str:
    """Why the ranks together trained on other rows than one process."""
    ranks, together, alone = len(found.ranks), found.num_rows, reference.num_rows
    if together != alone:
        return (
            f"the ranks took {together} rows in the first step, one process {alone}: give a rank "
            "global_batch / WORLD_SIZE rows, or a DataLoader, whose batch is multiplied in the run of one process"
        )
    if all_rows(found) == all_rows(reference):
        return "the same rows in other steps: each rank shuffles, or takes its share, in an order of its own"
    if found.main.uses_accelerate:
        return (
            "accelerate shuffles by another generator on one process: give Accelerator a dataloader_config = "
            "DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)"
        )
    if not all_rows(found) & all_rows(reference):
        return "no row in common: random augmentation, or rows drawn by a generator that depends on the rank"
    return (
        f"{ranks} ranks must take shares of one order: DistributedSampler with the same seed, or rows "
        "RANK::WORLD_SIZE of one permutation"
    )


def all_rows(run: ScriptRun) -> Counter[str]:
    """The rows of all ranks and steps."""
    return Counter(row for rank in run.ranks for rows in rank.rows[: run.num_steps] for row in rows)


def step_rows(run: ScriptRun, step: int) -> Counter[str]:
    """The rows of one step over all ranks; of ranks that share rows under tensor parallelism, once."""
    lists = [tuple(rank.rows[step]) for rank in run.ranks]
    if run.main.is_tensor_parallel:
        lists = list(dict.fromkeys(lists))
    return Counter(row for rows in lists for row in rows)


def first_unequal(first: Mapping[str, str], second: Mapping[str, str]) -> str | None:
    """The first name whose digests differ, or that one of them lacks."""
    return next((name for name in {**first, **second} if first.get(name) != second.get(name)), None)
