"""Many model types in one group of ranks, since starting ranks takes longer than a tiny model.

`function(rank, num_ranks, model_types, *args, folder)` leaves its findings of each type by `keep_findings`. When a rank
fails, the type under way is judged by the failure, and the rest continues in a new group.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gloo import RankFailureError, run_ranks

Facts = dict[str, Any]
TYPES_A_GROUP, LIMIT_S_A_TYPE = 16, 240


def run_groups(
    function: Callable[..., None], model_types: list[str], num_ranks: int, *args: Any, size: int = TYPES_A_GROUP
) -> Iterator[tuple[str, list[Facts]]]:
    """What each rank found of each type, or one {"failed": traceback}."""
    left = list(model_types)
    while left:
        group = left[:size]
        with tempfile.TemporaryDirectory(prefix="model-types-") as folder:
            failure = _run_group(function, group, num_ranks, *args, folder)
            found = _collect(group, num_ranks, folder)
        failed = next((name for name in group if name not in found), None)
        if failed is not None:
            found[failed] = [{"failed": failure}]
        left = [name for name in left if name not in found]
        yield from found.items()


def keep_findings(findings: Facts, folder: str, model_type: str, rank: int) -> None:
    """Written beside and renamed: a file is complete or absent."""
    path = Path(folder, f"{model_type}.{rank}")
    torch.save(findings, f"{path}.part")
    Path(f"{path}.part").rename(path)


def _run_group(function: Callable[..., None], group: list[str], num_ranks: int, *args: Any) -> str:
    try:
        run_ranks(function, num_ranks, group, *args, timeout_s=LIMIT_S_A_TYPE * len(group))
    except RankFailureError as error:
        return str(error)
    return ""


def _collect(group: list[str], num_ranks: int, folder: str) -> dict[str, list[Facts]]:
    found = {}
    for name in group:
        files = [Path(folder) / f"{name}.{rank}" for rank in range(num_ranks)]
        if all(file.exists() for file in files):
            found[name] = [torch.load(file, weights_only=False) for file in files]
    return found
