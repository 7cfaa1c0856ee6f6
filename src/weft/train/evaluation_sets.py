"""Evaluation sets: the held-out documents (`held-out`), and the tables [[data.evaluation]] with rows of their own.

Rows are read in their order, from the first on, and divided over data-parallel ranks as training rows are; the last
batch of a set is filled with rows of weight zero. So the loss of a set does not depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.core.errors import DataError
from weft.core.loop_spec import HELD_OUT
from weft.core.run_spec import RunSpec
from weft.data import Loader, Split, open_corpus
from weft.data.building import BuildProgress
from weft.data.mixture import Mixture
from weft.data.rows import RowLayout


@dataclass(frozen=True)
class EvaluationSet:
    """The rows of one set, of this rank."""

    loader: Loader
    max_batches: int

    def batches(self) -> list[dict[str, Tensor]]:
        """The global batches of one evaluation; the same at each."""
        positions = [index * self.loader.global_batch for index in range(self.max_batches)]
        return [self.loader.batch(at) for at in positions if self.loader.has_batch(at)]


def open_sets(run: RunSpec, held_out: Split | Mixture | None, share: dict[str, Any]) -> dict[str, EvaluationSet]:
    """The sets by name; none if nothing is evaluated. `share`: seed, batch and rank of a `Loader`."""
    if run.evaluation.interval == 0:
        return {}
    sets: dict[str, EvaluationSet] = {}
    if held_out is not None:
        loader = Loader(held_out, epochs=1, shuffle=False, layout=RowLayout.of(run.data), **share)
        sets[HELD_OUT] = EvaluationSet(loader, run.evaluation.batches)
    for given in run.data.evaluation:
        part = run.data.evaluation_parts[given.name]
        try:
            rows = open_corpus(part).training
            loader = Loader(rows, epochs=1, shuffle=False, layout=RowLayout.of(part), **share)
        except DataError as error:
            raise DataError(
                f"the evaluation set {given.name!r} has no row: {error.message}",
                hint="give [[data.evaluation]] more text, or lower data.sequence_length",
            ) from None
        sets[given.name] = EvaluationSet(loader, given.batches or run.evaluation.batches)
    return sets


def prepare_sets(run: RunSpec, progress: BuildProgress) -> None:
    """Build the token caches of the sets, before ranks join."""
    if run.evaluation.interval:
        for part in run.data.evaluation_parts.values():
            open_corpus(part, progress=progress)
