"""`DueSteps`: after which steps a run saves, evaluates, copies, samples and logs. A function of run.toml alone."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.run_spec import RunSpec


@dataclass(frozen=True)
class DueSteps:
    run: RunSpec

    def is_checkpoint(self, step: int) -> bool:
        return _divides(self.run.checkpoint.every, step) and step < self.run.train.steps

    def is_copied(self, step: int) -> bool:
        return _divides(self.run.checkpoint.memory_every, step)

    def is_evaluation(self, step: int) -> bool:
        every = self.run.evaluation.interval
        return every > 0 and (_divides(every, step) or step == self.run.train.steps)

    def is_sampled(self, step: int) -> bool:
        return _divides(self.run.samples.every, step)

    def is_logged(self, step: int) -> bool:
        return step == 1 or _divides(self.run.logging.every, step) or step == self.run.train.steps

    def is_pause(self, step: int) -> bool:
        """Whether the engine's state is read after this step."""
        return any(one(step) for one in (self.is_checkpoint, self.is_evaluation, self.is_copied, self.is_sampled))


def _divides(every: int, step: int) -> bool:
    """0 is never."""
    return every > 0 and step % every == 0
