"""The record of one run of a script: a JSON file per rank, and tensors in torch's format. No hooks, no comparison.

rank-R.json       losses, hashes of input rows, norms and digests of gradients, rates, by step
gradients-R.pt    full gradients of the first step; of rank 0 alone if parameters are sharded
weights.pt        full parameters before the first step and after the last, of rank 0
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class ScriptTrace:
    """What one rank saw, by optimizer step."""

    rank: int = 0
    world_size: int = 1
    losses: list[float | None] = field(
        default_factory=list
    )  # the sum of the roots of `backward`; None without a scalar
    rows: list[list[str]] = field(default_factory=list)  # hashes of the rows that the model trained on
    rates: list[float] = field(default_factory=list)
    gradient_norms: list[dict[str, float]] = field(default_factory=list)
    gradient_digests: list[dict[str, str]] = field(default_factory=list)
    initial_digests: dict[str, str] = field(default_factory=dict)
    last_digests: dict[str, str] = field(default_factory=dict)
    dtypes: list[str] = field(default_factory=list)  # of outputs of modules and of parameters
    is_replicated: bool = True  # no parameter is a DTensor
    is_tensor_parallel: bool = False  # ranks may train on the same rows
    has_loader: bool = False
    has_batch_norm: bool = False
    has_dropout: bool = False
    uses_accelerate: bool = False

    @property
    def num_steps(self) -> int:
        """Finished steps of the first optimizer."""
        return len(self.losses)


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """One run of the script, read back."""

    ranks: tuple[ScriptTrace, ...]
    gradients: tuple[Tensors, ...]  # of every rank, or of rank 0 alone
    initial: Tensors
    weights: Tensors  # after the last step; empty if they could not be read

    @property
    def main(self) -> ScriptTrace:
        return self.ranks[0]

    @property
    def num_steps(self) -> int:
        return min(rank.num_steps for rank in self.ranks)

    @property
    def num_rows(self) -> int:
        """Rows of the first step over all ranks."""
        return sum(len(rank.rows[0]) for rank in self.ranks if rank.rows)

    @property
    def mean_losses(self) -> list[float] | None:
        """The mean over ranks by step; None where a rank had a step without a scalar root."""
        if any(value is None for rank in self.ranks for value in rank.losses[: self.num_steps]):
            return None
        series = zip(*(rank.losses[: self.num_steps] for rank in self.ranks), strict=True)
        return [sum(values) / len(self.ranks) for values in series]


def write_trace(folder: Path, trace: ScriptTrace, *, gradients: Tensors, initial: Tensors, weights: Tensors) -> None:
    """Write this rank's files; tensors of `initial` and `weights` are rank 0's."""
    if trace.rank == 0 or trace.is_replicated:
        torch.save(gradients, folder / f"gradients-{trace.rank}.pt")
    if trace.rank == 0:
        torch.save({"initial": initial, "weights": weights}, folder / "weights.pt")
    (folder / f"rank-{trace.rank}.json").write_text(json.dumps(asdict(trace)), encoding="utf-8")


def read_run(folder: Path) -> ScriptRun:
    """All ranks of one run; no ranks if the script ended before its first step."""
    files = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.removeprefix("rank-")))
    ranks = tuple(ScriptTrace(**_fields(path)) for path in files)
    saved = [folder / f"gradients-{trace.rank}.pt" for trace in ranks]
    tensors = torch.load(folder / "weights.pt", mmap=True) if ranks else {"initial": {}, "weights": {}}
    return ScriptRun(
        ranks=ranks,
        gradients=tuple(torch.load(path, mmap=True) for path in saved if path.exists()),
        initial=tensors["initial"],
        weights=tensors["weights"],
    )


def _fields(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fields
