"""`LoopOutcome`: what a training loop did, for the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.checkpoint import CommittedCheckpoint
from weft.core.terms import TimeTerm

STEP_TERMS = (TimeTerm.FORWARD, TimeTerm.BACKWARD, TimeTerm.FORWARD_BACKWARD, TimeTerm.OPTIMIZER)


@dataclass
class LoopOutcome:
    """Results of the loop, for the ledger."""

    status: str = "finished"
    ending: str = ""  # why the run ended before its last step, unless it was stopped
    steps: int = 0
    seconds: dict[TimeTerm, float] = field(default_factory=lambda: dict.fromkeys(TimeTerm, 0.0))
    timed_steps: int = 0  # steps whose forward, backward and optimizer are in `seconds`
    checkpoints: list[dict[str, Any]] = field(default_factory=list)

    def seconds_per_step(self) -> dict[TimeTerm, float]:
        """Means: of the terms of a step over the timed steps, of the other terms over all steps."""
        timed, steps = max(1, self.timed_steps), max(1, self.steps)
        return {term: value / (timed if term in STEP_TERMS else steps) for term, value in self.seconds.items()}


def checkpoint_row(committed: CommittedCheckpoint) -> dict[str, Any]:
    return {
        "step": committed.step,
        "path": str(committed.path),
        "bytes": committed.size_bytes,
        "seconds": committed.save_s,
    }
