"""The steps at which a run rests: evaluations, snapshots, the end. Pure."""

from __future__ import annotations

from weft.core.server_spec import ServerRun


class Boundaries:
    def __init__(self, run: ServerRun) -> None:
        self._evaluate_every = run.evaluation.every
        self._snapshot_every = run.checkpoint.every
        self._full_every = run.checkpoint.full_every
        self._steps = run.train.steps

    def after(self, step: int) -> int:
        """The next step, above this one, after which the run rests."""
        every = [period for period in (self._evaluate_every, self._snapshot_every) if period]
        return min([self._steps, *((step // period + 1) * period for period in every)])

    def is_evaluation(self, step: int) -> bool:
        return bool(self._evaluate_every) and step % self._evaluate_every == 0

    def is_snapshot(self, step: int) -> bool:
        return bool(self._snapshot_every) and step % self._snapshot_every == 0

    def is_shrink(self, step: int) -> bool:
        """As planned, never where somebody stopped the run: it would go on from other rows than the whole run had."""
        return self.is_snapshot(step) or step == self._steps

    def is_full(self, step: int) -> bool:
        """The first snapshot, and every `full_every`-th after it."""
        return (step // max(1, self._snapshot_every) - 1) % self._full_every == 0
