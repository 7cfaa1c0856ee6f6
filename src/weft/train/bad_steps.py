"""Bad steps of a run: the batch and the reason of each, kept in the run folder, and what is done about them.

    bad_steps.jsonl                                     a line per bad step: step, reason, loss, samples, action, file
    bad_steps/step-00000012-sample-00000088.npz         its global batch: input_ids, labels, ..., samples, rows

`train.on_bad_step` is the policy; without one, a loss that is not finite ends the run after its update.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.disk import writing
from weft.core.errors import NumbersError
from weft.core.run_spec import RunSpec
from weft.data import Loader
from weft.engine.engine import Engine
from weft.engine.step_guard import BadStep, StepGuard
from weft.train.build import Workbench

FILE, FOLDER = "bad_steps.jsonl", "bad_steps"


class BadSteps:
    """One run's. `folder`: the run folder, on rank 0 only."""

    def __init__(self, run: RunSpec, bench: Workbench, folder: Path | None) -> None:
        self.policy = run.train.on_bad_step
        self._run, self._bench, self._folder = run, bench, folder
        self.num_rewinds = 0
        self.num_skipped = 0
        self._guard = self._guard_of(bench.engine) if self.policy else None

    def _guard_of(self, engine: Engine) -> StepGuard:
        train = self._run.train
        engine.guard = guard = StepGuard(engine, spike_factor=train.spike_factor, window=train.spike_window)
        return guard

    @property
    def found(self) -> BadStep | None:
        """The step that ran last, if it was bad: its update was not made."""
        return self._guard.found if self._guard is not None else None

    def begin(self) -> None:
        """Before a step."""
        if self._guard is not None:
            self._guard.begin()

    def undo(self) -> None:
        """After a bad step. Collective."""
        if self._guard is not None:
            self._guard.undo()

    def forget(self) -> None:
        """The bad step was dealt with."""
        if self._guard is not None:
            self._guard.found = None

    @property
    def may_rewind(self) -> bool:
        return self.policy == "rewind" and self.num_rewinds < self._run.train.max_rewinds

    def keep(self, bad: BadStep, *, first_sample: int, action: str) -> str:
        """Write the batch; returns a phrase that names the samples and the file."""
        last = first_sample + self._run.train.global_batch - 1
        name = f"{FOLDER}/step-{bad.step:08d}-sample-{first_sample:08d}.npz"
        if self._folder is not None:
            self._write(self._folder, name, bad, first_sample=first_sample, action=action)
        return f"samples {first_sample} to {last} are in {name} of the run folder"

    def _write(self, folder: Path, name: str, bad: BadStep, *, first_sample: int, action: str) -> None:
        loader = self._bench.training
        samples = loader.samples(first_sample)
        arrays: dict[str, Any] = {key: value.numpy() for key, value in loader.whole_batch(first_sample).items()}
        if isinstance(loader, Loader):
            arrays["rows"] = loader.rows_of(samples)
        values = {"loss": bad.loss, "grad_norm": bad.grad_norm}
        line = {
            "step": bad.step,
            "reason": bad.reason,
            **{key: value if np.isfinite(value) else None for key, value in values.items()},
            "first_sample": first_sample,
            "action": action,
            "batch": name,
        }
        with writing(folder / name):
            (folder / FOLDER).mkdir(exist_ok=True)
            np.savez_compressed(folder / name, samples=samples, **arrays)
            with (folder / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def error(self, bad: BadStep, kept: str, *, saved: str) -> NumbersError:
        """The error that ends the run. `saved`: where a resume continues."""
        after = f" after {self.num_rewinds} rewinds" if self.num_rewinds else ""
        return NumbersError(
            f"step {bad.step} was bad{after}: {bad.reason} (loss {bad.loss:.4g}, gradient norm {bad.grad_norm:.4g});"
            f" {kept}",
            hint=f"{saved}; lower train.learning_rate, or set train.on_bad_step = 'skip' to go on without such batches",
        )

    def state(self) -> dict[str, Any]:
        losses = list(self._guard.losses) if self._guard is not None else []
        return {"losses": losses, "rewinds": self.num_rewinds}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue with the losses and the count of a checkpoint; of this process's rewinds if it has made more."""
        if state is not None:
            self.num_rewinds = max(self.num_rewinds, int(state["rewinds"]))
            if self._guard is not None:
                self._guard.losses.clear()
                self._guard.losses.extend(state["losses"])
