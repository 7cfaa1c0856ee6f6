"""Checks losses, gradients and evaluations of the training loop against the plain transformers model.

Rows are rebuilt from the corpus: only the inputs of the run's batches are read, to find the rows. The first
step starts from the initial weights, the last one from the checkpoint before it. The float64 reference's first loss
is compared with the same number. If training is random (dropout), only evaluations are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import torch

from weft.verify.oracle.facts import LoopFacts, RunFacts, Saved, Tensors
from weft.verify.oracle.mixtures import MixedStream
from weft.verify.oracle.model import Batch, Loss, PlainModel
from weft.verify.oracle.samples import SampleStream
from weft.verify.oracle.schedule_free import evaluated
from weft.verify.oracle.streams import IGNORED, Stream
from weft.verify.oracle.updates import OracleUpdate, recovered_gradients
from weft.verify.tolerances import SLACK, SUM_ROUNDINGS, UNIT_ROUNDOFF, envelope, scalar_bound
from weft.verify.verdict import Check, Finding

NAME, RULE = "oracle loss", 12
PLAIN = 4.0 * SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"]  # relative: float32 forwards with other kernels
DIFFERENCE = 32.0 * UNIT_ROUNDOFF["float32"]  # of the sums that the loss of a pair is a small difference of
GRADIENT_TOLERANCE = 1e-3  # of the norm of all gradients, in float32
LOW_SHARE = 0.25  # of a roundoff: minimum effect of a low-precision forward on an evaluation

AnyStream = Stream | SampleStream | MixedStream


class WrongLossError(Exception):
    """The first wrong number, as a finding."""

    def __init__(self, expected: str, found: str, *, step: int, place: str | None = None) -> None:
        super().__init__(expected)
        self.finding = Finding(rule=RULE, step=step, coordinates=place, expected=expected, found=found)


@dataclass(frozen=True, kw_only=True)
class LossJudge:
    """Compares the loop's numbers with those of `plain`; `streams`: training and held out."""

    facts: RunFacts
    plain: PlainModel
    streams: tuple[AnyStream, AnyStream | None]

    def check(self) -> Check:
        if self.plain.draws_buffers:
            return Check.passed(NAME, "not judged: the model draws constants of its forward when it is built")
        try:
            details = [*self._training(), *self._held_out()]
        except WrongLossError as wrong:
            return Check.failed(NAME, wrong.finding)
        return Check.passed(NAME, "; ".join(details))

    @property
    def loop(self) -> LoopFacts:
        return self.facts.loop

    @property
    def initial(self) -> Tensors:
        """The values that the first forward has."""
        return {**self.facts.initial, **self.loop.at_rest}

    @property
    def rows(self) -> int:
        return int(self.facts.loop_run["train"]["global_batch"])

    def _training(self) -> list[str]:
        loop, last = self.loop, len(self.loop.losses)
        self.plain.put(self.initial)
        batches = [self.plain.with_reference(self._batch(step)) for step in (1, last)]
        batch = batches[0]
        if self.plain.is_random(batch):
            return ["training draws at random, judged by evaluations"]
        if float(self.facts.loop_run["router"]["capacity_factor"]):
            return ["training drops choices over the capacity of experts, judged by evaluations"]
        if loop.is_delayed:
            return ["micro-batches of a step read weights of several updates, judged by evaluations"]
        if len(loop.skipped) == len(loop.losses):
            return ["every step overflowed float16 and was skipped"]
        first = self._loss(batch)
        self._judge_first(first, batch)
        if last == 1 or last - 1 not in loop.saved_steps:
            return [f"the first loss and its gradients: {self._how(first)}"]
        self.plain.put({**self.initial, **loop.saved(last - 1).weights})
        found = self._loss(batches[1])
        self._require("loss", found.value, loop.losses, loop.truth_losses, loop.same_losses, last, _rounding(found))
        return [f"losses of steps 1 and {last}, first gradients: {self._how(first)}"]

    def _judge_first(self, first: Loss, batch: Batch) -> None:
        loop, reference = self.loop, self.loop.truth_losses[0]
        if loop.starts_rounded:
            return
        if not abs(reference - first.value) <= _rounding(first):
            place = "the loss of the reference"
            raise WrongLossError(f"{first.value:.9g} ({self._how(first)})", f"{reference:.9g}", step=1, place=place)
        self._require("loss", first.value, loop.losses, loop.truth_losses, loop.same_losses, 1, _rounding(first))
        if 0 in loop.skipped:
            return
        # the balancing loss has no gradient yet: its shares are uniform in the first step
        z_loss = float(self.facts.loop_run["router"]["z_loss"])
        gradients = self.plain.gradients(batch, chunk_rows=loop.chunk_rows, z_loss=z_loss)
        gradients = {name: value for name, value in gradients.items() if not self._is_frozen(name)}
        norm = math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))
        self._require("gradient norm", norm, loop.norms, loop.truth_norms, loop.same_norms, 1, PLAIN * norm)
        self._judge_gradients(gradients, norm)

    def _judge_gradients(self, gradients: Tensors, norm: float) -> None:
        """Compare the gradients of the first update, recovered from its moments, with the plain model's backward."""
        loop = self.loop
        if loop.compute != "float32" or loop.rounded_states or loop.has_coded_sums or 1 not in loop.saved_steps:
            return
        before, train = Saved(weights=self.facts.initial, states={}), self.facts.loop_run["train"]
        update = OracleUpdate(before=before, after=loop.saved(1), step=1, count=1, train=train, norm=loop.norms[0])
        found = recovered_gradients(update, gradients)
        factor = update.clipped_norm() / loop.norms[0] if loop.norms[0] else 1.0
        for name, right in gradients.items():
            gap = float((found[name] - factor * right.double()).norm()) if name in found else math.inf
            share = gap / (factor * norm or 1.0)
            if not share <= GRADIENT_TOLERANCE:
                raise WrongLossError(
                    "the plain model's gradient", f"one off by {share:.1e} of their norm", step=1, place=name
                )

    def _held_out(self) -> list[str]:
        loop, stream = self.loop, self.streams[1]
        steps = [step for step in loop.held_out_losses if step in loop.saved_steps]
        if stream is None or not steps or stream.num_rows == 0:
            return ["no evaluation was recorded"]
        step, asked = steps[-1], int(self.facts.loop_run["evaluation"]["batches"]) * self.rows
        indices = list(range(min(asked, stream.num_rows)))
        parts = [indices[at : at + self.rows] for at in range(0, len(indices), self.rows)]
        self.plain.put(self.initial)
        batches = [self.plain.with_reference(Batch(fields=dict(stream.batch_at(part)))) for part in parts]
        self.plain.put({**self.initial, **evaluated(loop.saved(step), self.facts.loop_run["train"])})
        found = self._mean(batches)
        how, value = self._how(found), found.value
        allowed = _rounding(found) + self._low_share(batches, value)
        if not abs(loop.held_out_losses[step] - value) <= allowed:
            expected = f"{value:.9g} within {allowed:.1e} ({how})"
            raise WrongLossError(expected, f"{loop.held_out_losses[step]:.9g}", step=step, place="the held-out loss")
        return [f"the held-out loss of step {step}: {how}"]

    def _mean(self, batches: Sequence[Batch]) -> Loss:
        """The loss over all batches, computed as that of the first one is."""
        counts = [self.plain.count(batch) for batch in batches]
        losses = [self._loss(batch, is_training=False) for batch in batches]
        pairs, total = list(zip(losses, counts, strict=True)), max(1, sum(counts))
        value = sum(loss.value * count for loss, count in pairs) / total
        size = sum(loss.size * count for loss, count in pairs) / total
        return replace(losses[0], value=value, size=size)

    def _low_share(self, batches: Sequence[Batch], value: float) -> float:
        """The effect of low precision on an evaluation, measured with the plain model in that format."""
        if self.loop.compute == "float32":
            return 0.0
        with self.plain.computing_in(getattr(torch, self.loop.compute)):
            distance = abs(self._mean(batches).value - value)
        return SLACK * distance + LOW_SHARE * UNIT_ROUNDOFF[self.loop.coarsest] * abs(value)

    def _require(
        self,
        what: str,
        right: float,
        found: Sequence[float],
        truth: Sequence[float],
        same: Sequence[float],
        step: int,
        rounding: float,
    ) -> None:
        """Require the loop's value within rounding, whose size the two references show; `rounding`: of float32."""
        least = self.loop.least_losses if what == "loss" else self.loop.least_norms
        distance = envelope(truth, same, least=least)[step - 1]
        bound = scalar_bound(truth=right, same_precision=same[step - 1], distance=distance, drift=rounding)
        if not abs(found[step - 1] - right) <= bound.allowed:
            raise WrongLossError(
                f"a {what} of {right:.9g} within {bound.allowed:.1e}", f"{found[step - 1]:.9g}", step=step
            )

    def _loss(self, batch: Batch, *, is_training: bool = True) -> Loss:
        return self.plain.loss(batch, chunk_rows=self.loop.chunk_rows, is_training=is_training)

    def _batch(self, step: int) -> Batch:
        """The global batch of a step: the run's choice of rows, with the tokens of the corpus."""
        position, stream = (step - 1) * self.rows, self.streams[0]
        read = self.facts.corpus.training.batch(position, dp_rank=0, dp_degree=1)
        epochs = self.facts.loop_run["data"].get("epochs")
        left = self.rows if epochs is None else min(self.rows, epochs * stream.num_rows - position)
        if not isinstance(stream, Stream):
            stream.require_known(read, left, place=f"the batch of step {step}")
            return Batch(fields=dict(read))
        rows = []
        for inputs, labels in zip(read["input_ids"], read["labels"], strict=True):
            at = stream.find(inputs, int(labels[-1]))
            if at is None:
                raise WrongLossError(
                    "rows of the corpus", f"inputs {inputs[:6].tolist()}...", step=step, place="the batch"
                )
            rows.append(stream.row(at))
        batch = Batch.of(np.stack(rows), stream)
        batch.fields["labels"][left:] = IGNORED
        return batch

    def _is_frozen(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.facts.loop_run["train"]["frozen"])

    def _how(self, loss: Loss) -> str:
        if self.plain.objective.what:
            return f"{self.plain.objective.what} written out from transformers' logits"
        if loss.own is not None:
            return "transformers' own labels= loss"
        return f"cross-entropy written out from its logits, since {loss.why_not_own}"


def _rounding(loss: Loss) -> float:
    """Of two float32 forwards with other kernels."""
    return PLAIN * abs(loss.value) + DIFFERENCE * loss.size
