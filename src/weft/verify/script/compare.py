"""The verdict on a script: its run on several ranks against its run on one process, check by check.

`repeated` is the run on one process once more, with gradients rounded otherwise: what it differs by is rounding, and
bounds are multiples of it, as for plans (`verify/tolerances.py`).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.verify.checks import check_scalars, check_tensors, norm_of
from weft.verify.script.causes import (
    disagreement_cause,
    first_unequal,
    gradient_cause,
    sample_cause,
    step_rows,
    uneven_cause,
)
from weft.verify.script.trace import ScriptRun
from weft.verify.tolerances import (
    SMALL_SCALE,
    UNIT_ROUNDOFF,
    scalar_drift,
    tensor_bound,
    tensor_drift,
)
from weft.verify.verdict import Check, Finding, Verdict, Worst

BATCH_CHANGE = "one process takes {ranks} times the batch of its DataLoader: each rank has a batch of its own"
DROPOUT_CHANGE = "dropout is off: its masks follow the rows of a process"


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    reference: ScriptRun
    repeated: ScriptRun
    found: ScriptRun

    def verdict(self, *, name: str, is_scaled: bool, elapsed_s: float) -> Verdict:
        ranks = len(self.found.ranks)
        gradients, worst_gradient = self._gradients()
        weights, worst_weight = self._weights()
        norms = self._norms()
        numbers = [self._losses(), gradients, norms, weights]
        checks = [self._repeatable(), self._initial(), self._rows(all(check.ok for check in numbers))]
        checks += [self._agreement(), self._rates(), *numbers]
        changes = [BATCH_CHANGE.format(ranks=ranks)] if is_scaled else []
        changes += [DROPOUT_CHANGE] if self.found.main.has_dropout else []
        return Verdict(
            plan=f"{name} on {ranks} ranks",
            steps=self._steps,
            checks=tuple(checks),
            changes=tuple(changes),
            loss_max_abs_diff=self._loss_difference(),
            grad_norm_max_rel_diff=self._norm_difference(),
            worst_gradient=worst_gradient,
            worst_weight=worst_weight,
            elapsed_s=elapsed_s,
        )

    @property
    def _steps(self) -> int:
        return min(self.reference.num_steps, self.repeated.num_steps, self.found.num_steps)

    @property
    def _dtype(self) -> str:
        names = {name for run in (self.reference, self.found) for name in run.main.dtypes if name in UNIT_ROUNDOFF}
        return max({"float32"} | (names - {"float64"}), key=UNIT_ROUNDOFF.__getitem__)

    @property
    def _is_low(self) -> bool:
        return self._dtype != "float32"

    def _repeatable(self) -> Check:
        """One process twice: initial weights, rows, first loss and gradients have the same bits."""
        first, again = self.reference.main, self.repeated.main
        wrong = first_unequal(first.initial_digests, again.initial_digests)
        what = "initial weights" if wrong else ""
        if not what and first.rows[:1] != again.rows[:1]:
            what, wrong = "rows of the first step", None
        if not what and (wrong := first_unequal(first.gradient_digests[0], again.gradient_digests[0])):
            what = "first gradients"
        if not what:
            return Check.passed("repeatable", "one process twice: the same initial weights, rows, first gradients")
        finding = Finding(
            rule=3, parameter=wrong, step=1, expected=f"the same {what} in two runs on one process", found="others",
            cause="random numbers without a seed: set torch.manual_seed, and the generator of the DataLoader",
        )  # fmt: skip
        return Check.failed("repeatable", finding)

    def _initial(self) -> Check:
        """Weights before the first step: on all ranks alike, and those of one process."""
        for rank in self.found.ranks:
            wrong = first_unequal(self.found.main.initial_digests, rank.initial_digests)
            if wrong is not None:
                cause = "weights are not broadcast: seed all ranks alike before the model is built, or use DDP"
                where = f"rank {rank.rank}"
                finding = Finding(
                    rule=4,
                    parameter=wrong,
                    coordinates=where,
                    expected="the values of rank 0",
                    found="others",
                    cause=cause,
                )
                return Check.failed("initial weights", finding)
        wrong = first_unequal(self.reference.main.initial_digests, self.found.main.initial_digests)
        if wrong is not None:
            cause = "the seed, or the order of random numbers, depends on the rank or on the number of ranks"
            finding = Finding(
                rule=4, parameter=wrong, expected="the values of one process", found="others on all ranks", cause=cause
            )
            return Check.failed("initial weights", finding)
        return Check.passed("initial weights", f"{len(self.reference.initial)} parameters, equal bits on all ranks")

    def _rows(self, numbers_agree: bool) -> Check:
        """The rows that the model trained on, by step."""
        if repeated := self._same_rows():
            return repeated
        for step in range(self._steps):
            alone, together = step_rows(self.reference, step), step_rows(self.found, step)
            if alone == together:
                continue
            if numbers_agree:
                return Check.passed("samples", f"inputs of step {step + 1} differ in form; all numbers agree")
            number = sum(alone.values())
            finding = Finding(
                rule=3, step=step + 1, expected=f"the {number} rows of one process",
                found=f"{sum((alone & together).values())} of them among {sum(together.values())}",
                cause=sample_cause(self.reference, self.found),
            )  # fmt: skip
            return Check.failed("samples", finding)
        counted = sum(map(len, self.reference.main.rows[: self._steps]))
        return Check.passed(
            "samples", f"{counted} rows, the same in every step" if counted else "no input rows were seen"
        )

    def _same_rows(self) -> Check | None:
        """Two ranks that train on one another's rows, which only tensor parallelism does."""
        first = self.found.main
        if first.is_tensor_parallel or not first.rows or not first.rows[0]:
            return None
        for rank in self.found.ranks[1:]:
            if rank.rows[: self._steps] == first.rows[: self._steps]:
                finding = Finding(
                    rule=3, step=1, coordinates=f"rank {rank.rank}", expected="rows of its own",
                    found="the rows of rank 0",
                    cause="no share by rank: a DataLoader without DistributedSampler, or rows not RANK::WORLD_SIZE",
                )  # fmt: skip
                return Check.failed("samples", finding)
        return None

    def _agreement(self) -> Check:
        """Gradients of all steps, and weights after the last, have the same bits on all ranks."""
        main = self.found.main
        for step in range(self._steps):
            for rank in self.found.ranks:
                wrong = first_unequal(main.gradient_digests[step], rank.gradient_digests[step])
                if wrong is not None:
                    return self._disagreement(wrong, rank.rank, step=step + 1, what="gradient")
        for rank in self.found.ranks:
            wrong = first_unequal(main.last_digests, rank.last_digests)
            if wrong is not None:
                return self._disagreement(wrong, rank.rank, step=self._steps, what="weight")
        return Check.passed("ranks agree", "gradients of every step and last weights: equal bits on all ranks")

    def _disagreement(self, parameter: str, rank: int, *, step: int, what: str) -> Check:
        cause = disagreement_cause(self.found, self.reference, step=step)
        finding = Finding(
            rule=1, step=step, parameter=parameter, coordinates=f"rank {rank}", expected=f"the {what} of rank 0",
            found="another", cause=cause if what == "gradient" else "updates differ between ranks",
        )  # fmt: skip
        return Check.failed("ranks agree", finding)

    def _rates(self) -> Check:
        pairs = zip(self.reference.main.rates, self.found.main.rates, strict=False)
        for step, (alone, together) in enumerate(pairs, start=1):
            if step <= self._steps and not math.isclose(alone, together, rel_tol=1e-9):
                finding = Finding(
                    rule=3, step=step, expected=f"{alone:.6g}", found=f"{together:.6g}",
                    cause="the schedule counts ranks or local rows (accelerate's scheduler steps once per process)",
                )  # fmt: skip
                return Check.failed("learning rate", finding)
        return Check.passed("learning rate", f"{self._steps} values, equal")

    def _losses(self) -> Check:
        """The mean of the ranks' losses, or their sum where each rank divides by the global count."""
        series = [run.mean_losses for run in (self.reference, self.repeated, self.found)]
        if any(values is None for values in series):
            return Check.passed("loss", "not compared: a root of backward is no scalar")
        truth, same, found = (values[: self._steps] for values in series if values is not None)
        drifts = [self._scalar_drift(value, other) for value, other in zip(truth, same, strict=True)]
        mean = check_scalars("loss", truth, same, found, rule=1, drifts=drifts)
        if mean.ok:
            return replace(mean, detail=f"mean over ranks: {mean.detail}")
        total = check_scalars(
            "loss", truth, same, [len(self.found.ranks) * each for each in found], rule=1, drifts=drifts
        )
        if total.ok:
            return replace(total, detail=f"sum over ranks: {total.detail}")
        assert mean.finding is not None
        return replace(mean, finding=replace(mean.finding, cause=uneven_cause(self.found)))

    def _scalar_drift(self, value: float, other: float) -> float:
        if not self._is_low:
            return 0.0
        return scalar_drift(distance=abs(value - other), size=abs(value), roundoff=UNIT_ROUNDOFF[self._dtype])

    def _gradients(self) -> tuple[Check, Worst]:
        truth, same, found = (run.gradients[0] for run in (self.reference, self.repeated, self.found))
        drifts = {
            name: tensor_drift(distance=0.0, norm=norm_of(value), roundoff=UNIT_ROUNDOFF[self._dtype]) * self._is_low
            for name, value in truth.items()
        }
        check, worst = check_tensors("gradients", truth, same, found, rule=1, dtype=self._dtype, step=1, drifts=drifts)
        if check.finding is not None:
            cause = gradient_cause(truth, found, self.found)
            check = replace(check, finding=replace(check.finding, cause=cause))
        return check, worst

    def _weights(self) -> tuple[Check, Worst]:
        runs = (self.reference, self.repeated, self.found)
        if not all(run.weights for run in runs) or len({run.num_steps for run in runs}) > 1:
            return Check.passed("weights", "not compared: the script ended before they could be read"), Worst()
        truth, same, found = (run.weights for run in runs)
        check, worst = check_tensors(
            "weights", truth, same, found, rule=1, dtype=self._dtype, initial=self.reference.initial, step=self._steps
        )
        return check, worst

    def _norms(self) -> Check:
        """The norm of every parameter's gradient in every step."""
        worst = 0.0
        for step, name, right, value, bound in self._norm_rows():
            worst = max(worst, abs(value - right) / bound)
            if not abs(value - right) <= bound:
                finding = Finding(
                    rule=2, step=step, parameter=name, expected=f"{right:.6g} within {bound:.1e}", found=f"{value:.6g}"
                )
                return Check.failed("gradient norm", finding)
        number = len(self.reference.main.gradient_norms[0])
        return Check.passed("gradient norm", f"{number} parameters in {self._steps} steps", margin=worst)

    def _norm_rows(self) -> Iterator[tuple[int, str, float, float, float]]:
        """Step, parameter, the norm of one process, that of the ranks, the allowed difference."""
        alone, again, found = (run.main.gradient_norms for run in (self.reference, self.repeated, self.found))
        shares = []
        for step in range(self._steps):
            scale = SMALL_SCALE * _scale(alone[step])
            gaps = [
                abs(again[step].get(name, 0.0) - value) / (value + scale or 1.0) for name, value in alone[step].items()
            ]
            shares.append(max(gaps, default=0.0))
        for step, share in enumerate(itertools.accumulate(shares, max)):  # the effect of rounding does not shrink
            scale = _scale(alone[step])
            for name, right in alone[step].items():
                size = right + SMALL_SCALE * scale
                drift = (
                    tensor_drift(distance=0.0, norm=size, roundoff=UNIT_ROUNDOFF[self._dtype]) if self._is_low else 0.0
                )
                bound = tensor_bound(
                    distance=share * size, norm=right, update=0.0, scale=scale, dtype=self._dtype, drift=drift
                )
                yield step + 1, name, right, found[step].get(name, math.inf), max(bound.allowed, sys.float_info.min)

    def _loss_difference(self) -> float:
        truth, found = self.reference.mean_losses, self.found.mean_losses
        if truth is None or found is None:
            return 0.0
        return max((abs(alone - together) for alone, together in zip(truth, found, strict=False)), default=0.0)

    def _norm_difference(self) -> float:
        totals = [
            [math.sqrt(sum(value**2 for value in norms.values())) for norms in run.main.gradient_norms[: self._steps]]
            for run in (self.reference, self.found)
        ]
        return max((abs(alone - found) / (alone or 1.0) for alone, found in zip(*totals, strict=True)), default=0.0)


def _scale(norms: dict[str, float]) -> float:
    return math.sqrt(sum(value**2 for value in norms.values()) / max(1, len(norms)))
