"""The best evaluation so far, and the evaluations without improvement: which checkpoint is kept, when a run ends.

The loss is that of one evaluation set, reduced over all ranks, so all ranks decide alike. A checkpoint has the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.core.loop_spec import HELD_OUT
from weft.core.run_spec import RunSpec


@dataclass
class BestEvaluation:
    """`see` takes the losses of each evaluation in turn."""

    name: str  # of the evaluation set; empty: nothing is watched
    stop_after: int = 0  # evaluations without improvement; 0: the run goes on
    delta: float = 0.0
    loss: float = math.inf
    step: int = 0
    reference: float = math.inf  # the loss that the next improvement is measured from
    num_without: int = 0

    @classmethod
    def of(cls, run: RunSpec) -> BestEvaluation:
        train = run.train
        return cls(run.watched_set, stop_after=train.stop_after_evaluations, delta=train.stop_delta)

    def see(self, step: int, losses: Mapping[str, float]) -> bool:
        """Whether the loss of this evaluation is the lowest so far. One that is not finite never is."""
        if self.name not in losses:
            return False
        loss = losses[self.name]
        has_improved = loss < self.reference and (math.isinf(self.reference) or self.reference - loss >= self.delta)
        self.num_without = 0 if has_improved else self.num_without + 1
        self.reference = loss if has_improved else self.reference
        if not loss < self.loss:
            return False
        self.loss, self.step = loss, step
        return True

    @property
    def ending(self) -> str:
        """Why the run ends before its last step; empty while it goes on."""
        if not 0 < self.stop_after <= self.num_without:
            return ""
        by = f" by {self.delta:g}" if self.delta else ""
        best = f"the best loss is {self.loss:.4f} at step {self.step}" if self.step else "no loss was finite"
        return f"{self.name} did not improve{by} in {self.num_without} evaluations; {best}"

    def facts(self) -> dict[str, Any] | None:
        """Of the best evaluation, for best.json and the ledger."""
        return {"set": self.name, "step": self.step, "loss": self.loss} if self.step else None

    def state(self) -> dict[str, Any]:
        numbers = {key: value if math.isfinite(value) else None for key, value in asdict(self).items() if key in _STATE}
        return {"name": self.name, **numbers}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state`, unless it is of another set."""
        if state is not None and state.get("name") == self.name:
            for key in _STATE:
                setattr(self, key, math.inf if state[key] is None else state[key])


_STATE = ("loss", "step", "reference", "num_without")


def why_not_watched(run: RunSpec, sets: Mapping[str, Any]) -> str:
    """Empty if the set that the run watches exists; else what is missing."""
    if not run.watched_set or run.watched_set in sets:
        return ""
    what = "no document is held out" if run.watched_set == HELD_OUT else "it has no rows"
    return f"the evaluation set {run.watched_set!r} of checkpoint.keep_best and train.stop_after_evaluations: {what}"
