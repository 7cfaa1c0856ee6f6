"""The reference of delayed updates: one process that makes them one after another.

    pipedream       each micro-batch is one update; stage s of p reads the weights of p-1-s updates before, and
                    clips its own gradient. With vertical sync every stage reads those of p-1 updates before
    pipedream_2bw   a step is one update; it reads the weights of the step before
    offload         the same (`offload.delayed`); evaluations read the weights that the next step reads

Delays are counted from the last restart; no older weights are read. Weight versions are full copies in a list: the
engine's weight stash is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from weft.core.plan import Plan
from weft.models.layout import describe
from weft.models.pp.split import split_model
from weft.verify.eight_bit import round_moments
from weft.verify.plain_objectives import REFERENCE, plain_loss
from weft.verify.plain_optimizers import plain_optimizer, set_rate
from weft.verify.reference import (
    add_gradients,
    clip_gradients,
    copy_weights,
    evaluate,
    gradients_of,
    moved,
    on_host,
    prepare,
    states_of,
    with_reference,
)
from weft.verify.run_trace import Batch, BatchSplit, Exercise, ReferencePrecision, RunTrace, Tensors

OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Update delays of a plan. `stage_of` is keyed by parameter and not compared: the plan determines it."""

    schedule: str
    vertical_sync: bool
    num_stages: int
    num_microbatches: int
    dp_degree: int
    stage_of: Mapping[str, int] = field(compare=False)

    @staticmethod
    def of(plan: Plan, model: nn.Module) -> Delay | None:
        """None for a plan that updates once at the end of a step."""
        if not plan.has_delayed_updates:
            return None
        if plan.offload.delayed:
            return Delay(
                schedule=OFFLOAD,
                vertical_sync=False,
                num_stages=1,
                num_microbatches=plan.pipeline.microbatches,
                dp_degree=plan.mesh.dp_degree,
                stage_of={},
            )
        layout = describe(model)
        split = split_model(model, layout, num_stages=plan.mesh.pp, sizes=plan.pipeline.blocks)
        stages = {block: stage for stage, blocks in enumerate(split.stages) for block in blocks}
        stages.update(dict.fromkeys(split.idle, split.num_stages - 1))
        return Delay(
            schedule=plan.pipeline.schedule,
            vertical_sync=plan.pipeline.vertical_sync,
            num_stages=plan.mesh.pp,
            num_microbatches=plan.pipeline.microbatches,
            dp_degree=plan.mesh.dp_degree,
            stage_of={name: stages.get(unit, split.home(name)) for name, unit in layout.unit_of.items()},
        )

    @property
    def is_each(self) -> bool:
        """Whether every micro-batch is an update and every stage clips its own gradients."""
        return self.schedule == "pipedream"

    @property
    def evaluates_newest(self) -> bool:
        """Whether an evaluation reads all updates so far, which the next step need not do."""
        return self.schedule != OFFLOAD

    @property
    def norm_delay_steps(self) -> int:
        """Steps until a step's norm is reported."""
        return -(-(self.num_stages - 1) // self.num_microbatches)

    def lag(self, name: str) -> int:
        """Updates between the weights that are read and the newest ones, after warm-up."""
        if not self.is_each:
            return 1
        last = self.num_stages - 1
        return last if self.vertical_sync else last - self.stage_of[name]

    def microbatches(self, num_rows: int) -> Iterator[list[range]]:
        """The rows of every micro-batch: one range per data-parallel rank."""
        own = num_rows // self.dp_degree
        size = own // self.num_microbatches
        for index in range(self.num_microbatches):
            begins = (rank * own + index * size for rank in range(self.dp_degree))
            yield [range(begin, begin + size) for begin in begins]


def run_delayed(
    build: Callable[[], nn.Module], exercise: Exercise, precision: ReferencePrecision, split: BatchSplit, delay: Delay
) -> RunTrace:
    """Train as `run_reference` does, with the delays of a pipeline."""
    return _DelayedRun(build(), exercise, precision, split, delay).run()


class _DelayedRun:
    def __init__(
        self, model: nn.Module, exercise: Exercise, precision: ReferencePrecision, split: BatchSplit, delay: Delay
    ) -> None:
        self._model, self._aliases = prepare(model, precision, split)
        self._exercise, self._precision, self._split, self._delay = exercise, precision, split, delay
        self._device = next(model.parameters()).device
        self._masters = {
            name: nn.Parameter(
                value.to(self._device, precision.master, copy=True), requires_grad=name not in exercise.frozen
            )
            for name, value in exercise.initial.items()
        }
        self._trained = {name: master for name, master in self._masters.items() if master.requires_grad}
        self._optimizer = plain_optimizer(self._trained, exercise.train, is_fused=split.is_reordered)
        self._versions: list[Tensors] = [self._snapshot()]  # since the last restart
        self._objective = plain_loss(exercise.objective, compute=precision.compute, device=self._device)
        self._trace = RunTrace(initial=exercise.initial)

    def run(self) -> RunTrace:
        exercise, trace = self._exercise, self._trace
        batches, evaluation = (
            [moved(one, self._device) for one in of] for of in (exercise.batches, exercise.evaluation)
        )
        if self._objective.has_reference:
            copy_weights(self._model, self._masters, self._aliases)
            batches, evaluation = (
                [with_reference(self._model, one, self._split) for one in of] for of in (batches, evaluation)
            )
            trace.row_log_probs = [on_host(batch)[REFERENCE] for batch in batches]
        norms: list[float] = []
        for step, batch in enumerate(batches):
            set_rate(self._optimizer, exercise.rates[step])
            loss, squares = self._step(step, batch)
            norms.append((sum(squares) / len(squares)) ** 0.5)
            trace.losses.append(loss)
            reported = step if step in exercise.undelayed else step - self._delay.norm_delay_steps
            is_known = reported >= 0 and (reported == step or reported not in exercise.undelayed)
            trace.norms.append(norms[reported] if is_known else 0.0)
            if step == 0:
                trace.first_weights = on_host(self._masters)
            if step in (0, len(exercise.batches) - 1):
                if self._delay.evaluates_newest:
                    copy_weights(self._model, self._masters, self._aliases)
                else:
                    self._read(is_undelayed=step in exercise.undelayed)
                trace.eval_losses.append(evaluate(self._model, evaluation, self._objective))
            if step in exercise.restarts:
                self._versions = [self._snapshot()]
        trace.weights = on_host(self._masters)
        trace.optimizer = on_host(states_of(self._optimizer, self._trained))
        return trace

    def _step(self, step: int, batch: Batch) -> tuple[float, list[float]]:
        """Run one step; return its mean token loss and the squared norms of its updates."""
        count_of_step = self._objective.count(batch["labels"])
        total, squares, is_undelayed = 0.0, [], step in self._exercise.undelayed
        is_each = self._delay.is_each and not is_undelayed
        parts = list(self._delay.microbatches(batch["labels"].shape[0]))
        for index in range(len(parts)):
            if is_each or index == 0:
                self._read(is_undelayed=is_undelayed)
            rows = torch.cat([batch["labels"][part.start : part.stop] for part in parts[index]])
            count = self._objective.count(rows) if is_each else count_of_step
            total += sum(
                add_gradients(
                    self._model,
                    self._trained,
                    batch,
                    part,
                    self._exercise,
                    self._precision,
                    self._aliases,
                    step=step,
                    count=count,
                    objective=self._objective,
                )
                for part in (reversed(parts[index]) if self._split.is_reordered else parts[index])
            )
            if is_each or index == len(parts) - 1:
                squares.append(self._update(by_stage=is_each))
        return total / count_of_step, squares

    def _read(self, *, is_undelayed: bool) -> None:
        """Copy the weight versions that this update reads into the model."""
        newest = len(self._versions) - 1
        lags = {name: 0 if is_undelayed else self._delay.lag(name) for name in self._masters}
        read = {name: self._versions[max(0, newest - lag)][name] for name, lag in lags.items()}
        copy_weights(self._model, read, self._aliases)

    def _update(self, *, by_stage: bool) -> float:
        groups = [list(self._trained)]
        if not self._trace.first_gradients:
            self._trace.first_gradients = on_host(gradients_of(self._trained))
        if by_stage:
            stage_of, stages = self._delay.stage_of, range(self._delay.num_stages)
            groups = [[name for name in self._trained if stage_of[name] == stage] for stage in stages]
        square = 0.0
        for names in groups:
            norm = clip_gradients([self._trained[name] for name in names], self._exercise.clip_norm)
            square += norm**2
        self._optimizer.step()
        if self._precision.has_8bit_moments:
            round_moments(self._optimizer, self._trained.values())
        self._optimizer.zero_grad()
        self._versions.append(self._snapshot())
        if len(self._versions) > self._delay.num_stages + 1:  # no stage reads older weights
            self._versions[-self._delay.num_stages - 2] = {}
        return square

    def _snapshot(self) -> Tensors:
        return {name: master.detach().clone() for name, master in self._masters.items()}
