"""The reference of a pipeline that does not drain: one process that carries out the same delayed updates, in turn.

    pipedream       micro-batch k is an update of its own; stage s of p reads the weights of p-1-s updates before, and
                    clips its own gradient. With vertical sync every stage reads those of p-1 updates before
    pipedream_2bw   a step is an update; it reads the weights of the step before

Delays are counted from the last restart, before which nothing is read. WeightStash are whole copies in a list: what a
stage stashes, and when, is the engine's affair.
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
from weft.verify.reference import (
    Batch,
    BatchSplit,
    Exercise,
    ReferencePrecision,
    RunTrace,
    Tensors,
    add_gradients,
    clip_gradients,
    copy_weights,
    evaluate,
    moved,
    on_host,
    plain_optimizer,
    prepare,
    states_of,
)


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Of a plan. `stage_of` is by parameter; it takes no part in comparisons, since a plan decides it."""

    schedule: str
    vertical_sync: bool
    num_stages: int
    num_microbatches: int
    dp_degree: int
    stage_of: Mapping[str, int] = field(compare=False)

    @staticmethod
    def of(plan: Plan, model: nn.Module) -> Delay | None:
        """None where a plan's updates wait for the whole step."""
        if plan.mesh.pp == 1 or not plan.pipeline.never_drains:
            return None
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
        """Whether every micro-batch is an update, and every stage clips by itself."""
        return self.schedule == "pipedream"

    @property
    def told_after(self) -> int:
        """Steps until a norm is told."""
        return -(-(self.num_stages - 1) // self.num_microbatches)

    def lag(self, name: str) -> int:
        """Updates between the weights that are read and the newest, once there have been so many."""
        if not self.is_each:
            return 1
        last = self.num_stages - 1
        return last if self.vertical_sync else last - self.stage_of[name]

    def microbatches(self, num_rows: int) -> Iterator[list[range]]:
        """The rows of every micro-batch, of one data-parallel rank after the other."""
        own = num_rows // self.dp_degree
        size = own // self.num_microbatches
        for index in range(self.num_microbatches):
            begins = (rank * own + index * size for rank in range(self.dp_degree))
            yield [range(begin, begin + size) for begin in begins]


def run_delayed(
    build: Callable[[], nn.Module], exercise: Exercise, precision: ReferencePrecision, cut: BatchSplit, delay: Delay
) -> RunTrace:
    """As `run_reference`, with the delays of a pipeline."""
    return _Run(build(), exercise, precision, cut, delay).course()


class _Run:
    def __init__(
        self, model: nn.Module, exercise: Exercise, precision: ReferencePrecision, cut: BatchSplit, delay: Delay
    ) -> None:
        self._model, self._aliases = prepare(model, precision, cut)
        self._exercise, self._precision, self._cut, self._delay = exercise, precision, cut, delay
        self._device = next(model.parameters()).device
        self._masters = {
            name: nn.Parameter(
                value.to(self._device, precision.master, copy=True), requires_grad=name not in exercise.frozen
            )
            for name, value in exercise.initial.items()
        }
        self._trained = {name: master for name, master in self._masters.items() if master.requires_grad}
        self._optimizer = plain_optimizer(list(self._trained.values()), exercise.train, is_fused=cut.is_reordered)
        self._versions: list[Tensors] = [self._snapshot()]  # since the last restart
        self._course = RunTrace(initial=exercise.initial)

    def course(self) -> RunTrace:
        exercise, course = self._exercise, self._course
        evaluation = [moved(batch, self._device) for batch in exercise.evaluation]
        norms: list[float] = []
        for step, batch in enumerate(exercise.batches):
            for group in self._optimizer.param_groups:
                group["lr"] = exercise.rates[step]
            loss, squares = self._step(step, moved(batch, self._device))
            norms.append((sum(squares) / len(squares)) ** 0.5)
            course.losses.append(loss)
            told = step if step in exercise.prompt else step - self._delay.told_after
            is_known = told >= 0 and (told == step or told not in exercise.prompt)
            course.norms.append(norms[told] if is_known else 0.0)
            if step == 0:
                course.first_weights = on_host(self._masters)
            if step in (0, len(exercise.batches) - 1):
                copy_weights(self._model, self._masters, self._aliases)
                course.eval_losses.append(evaluate(self._model, evaluation))
            if step in exercise.restarts:
                self._versions = [self._snapshot()]
        course.weights = on_host(self._masters)
        course.optimizer = on_host(states_of(self._optimizer, self._trained))
        return course

    def _step(self, step: int, batch: Batch) -> tuple[float, list[float]]:
        """The mean token loss of a step, and the squared norms of its updates."""
        count_of_step = _count(batch["labels"])
        total, squares, is_prompt = 0.0, [], step in self._exercise.prompt
        is_each = self._delay.is_each and not is_prompt
        parts = list(self._delay.microbatches(batch["labels"].shape[0]))
        for index in range(len(parts)):
            if is_each or index == 0:
                self._read(is_prompt=is_prompt)
            rows = torch.cat([batch["labels"][part.start : part.stop] for part in parts[index]])
            count = _count(rows) if is_each else count_of_step
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
                )
                for part in (reversed(parts[index]) if self._cut.is_reordered else parts[index])
            )
            if is_each or index == len(parts) - 1:
                squares.append(self._update(by_stage=is_each))
        return total / count_of_step, squares

    def _read(self, *, is_prompt: bool) -> None:
        """The model gets the weights that are read now."""
        newest = len(self._versions) - 1
        lags = {name: 0 if is_prompt else self._delay.lag(name) for name in self._masters}
        read = {name: self._versions[max(0, newest - lag)][name] for name, lag in lags.items()}
        copy_weights(self._model, read, self._aliases)

    def _update(self, *, by_stage: bool) -> float:
        groups = [list(self._trained)]
        if not self._course.first_gradients:
            self._course.first_gradients = on_host(
                {name: master.grad for name, master in self._trained.items() if master.grad is not None}
            )
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
        if len(self._versions) > self._delay.num_stages + 1:  # nobody is so late
            self._versions[-self._delay.num_stages - 2] = {}
        return square

    def _snapshot(self) -> Tensors:
        return {name: master.detach().clone() for name, master in self._masters.items()}


def _count(labels: torch.Tensor) -> int:
    return max(1, int((labels != -100).sum()))
