"""A plan's evidence against the references: the checks in the order of cause and effect.

    rows, initial weights, formats -> loss -> gradients -> norm -> update -> weights, states, replicas -> evaluation

`truth` bounds every plan. In low precision `same` gives the tighter bound: one process with the same roundings; up to
the first update the two differ only in the order of float32 sums. Only rank 0 compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.core import axes
from weft.core.plan import Plan
from weft.core.run_spec import TrainSpec
from weft.verify.buffer_check import check_buffers
from weft.verify.checks import (
    check_scalar,
    check_scalars,
    check_tensors,
    distance_of,
    norm_of,
    owner_of,
    worst_scalars,
)
from weft.verify.evidence import Evidence
from weft.verify.exercise import plan_precision
from weft.verify.expert_checks import allowed_choices, check_biases, check_drops, check_loads
from weft.verify.facts import check_dtypes, check_initial, check_replicas, check_rows
from weft.verify.forward_weights import check_forward_weights
from weft.verify.layouts import coordinates_of
from weft.verify.low_update import LowUpdate, check_updates
from weft.verify.plain_objectives import REFERENCE
from weft.verify.reference import one_update
from weft.verify.references import References
from weft.verify.run_trace import Exercise, RunTrace, Tensors, has_experts
from weft.verify.tolerances import (
    CODE_ROUNDOFF,
    NOISE_SHARE,
    TERM_DRAWS,
    UNIT_ROUNDOFF,
    envelope,
    first_norm_bound,
    scalar_drift,
    tensor_drift,
)
from weft.verify.verdict import Check, Coverage, Worst

Drifts = Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    plan: Plan
    train: TrainSpec
    steps: int
    exercise: Exercise
    references: References
    found: Evidence
    is_stream: bool = True  # rows are cut from one stream of text

    def numbers(self) -> dict[str, Any]:
        """The verdict's figures, reported whether the checks pass or fail."""
        truth, same, found = self.references.truth, self.references.same, self.found
        return {
            "loss_max_abs_diff": worst_scalars(truth.losses, found.losses, relative=False),
            "grad_norm_max_rel_diff": worst_scalars(truth.norms, found.norms, relative=True),
            "worst_gradient": self._gradients(truth, same)[1],
            "worst_weight": self._weights(truth, same)[1],
            "replicated_parameters": self._replicated(),
            "untrained_parameters": self._untrained(),
            "coverage": self._coverage() if self.plan.mesh.tp > 1 else (),
        }

    def _replicated(self) -> tuple[str, ...]:
        """Parameters that the plan could shard and does not: on the tp axis if it has one, else on dp_shard."""
        if self.plan.mesh.tp > 1:
            return tuple(row.name for row in self.found.coverage if axes.TP not in row.sharded_axes)
        is_sharded = self.plan.data_parallel.zero > 0
        return tuple(row.name for row in self.found.coverage if is_sharded and not row.sharded_axes)

    def _untrained(self) -> tuple[str, ...]:
        """Trainable parameters without a gradient in one process."""
        trained = {*self.references.truth.first_gradients, *self.exercise.frozen}
        return tuple(name for name in self.exercise.initial if name not in trained)

    def _coverage(self) -> tuple[Coverage, ...]:
        return tuple(
            Coverage(name=row.name, shape=row.shape, sharded_axes=row.sharded_axes, reason=row.reason)
            for row in self.found.coverage
        )

    def checks(self) -> list[Check]:
        truth, same, found = self.references.truth, self.references.same, self.found
        allowance = self.references.allowance
        checks = [
            check_rows(self.exercise.batches, found.batches, describe_row=self._rank_of_row, is_stream=self.is_stream),
            check_initial(self.exercise.initial, found.initial, describe_owner=self._owner),
            check_dtypes(found.dtypes),
            *self._reference(truth, same),
            *(one.check() for one in found.coded),
            check_forward_weights(
                found.forward_weights, never_flushes=self.plan.never_flushes, describe_rank=self._describe
            ),
            check_scalars("loss", truth.losses, same.losses, found.losses, rule=1, least=allowance.losses),
            self._gradients(truth, same, dtype=self.plan.precision.policy().weights)[0],
            check_scalars("gradient norm", truth.norms, same.norms, found.norms, rule=2, least=allowance.norms),
            *self._rounded_updates(),
            self._first_update(truth, same),
            self._weights(truth, same)[0],
            self._states(truth, same),
            check_replicas(found.digests, describe_rank=self._describe),
            check_scalars(
                "evaluation",
                truth.eval_losses,
                same.eval_losses,
                found.eval_losses,
                rule=1,
                steps=[1, self.steps],
                drifts=truth.eval_swings,
                least=self.references.evaluation_least,
            ),
            check_buffers(truth, same, found, step=self.steps, noise_share=allowance.update),
        ]
        checks += self._experts(truth, same) if found.loads else []
        if self.references.reordered is not None:
            checks.append(self._same_precision(self.references.reordered))
        return checks

    def _reference(self, truth: RunTrace, same: RunTrace) -> list[Check]:
        """Check the log-probabilities of the reference, row by row: those of the initial weights."""
        if not truth.row_log_probs:
            return []
        right, near = _by_step(truth.row_log_probs), _by_step(same.row_log_probs)
        rounded = self.references.allowance.is_at_once
        drifts = {
            key: tensor_drift(distance=distance_of(right[key], low), norm=norm_of(low), roundoff=self._roundoff())
            for key, low in near.items()
        }
        check, _ = check_tensors(
            "reference", right, near, _by_step([batch.get(REFERENCE) for batch in self.found.batches]),
            rule=15, dtype="float32", drifts=drifts if rounded else None,
        )  # fmt: skip
        return [check]

    def _experts(self, truth: RunTrace, same: RunTrace) -> list[Check]:
        allowed, router = allowed_choices(truth, same), self.exercise.router
        checks = [check_loads(truth, self.found, allowed)]
        if router.capacity_factor:
            checks.append(check_drops(truth, self.found, allowed))
        if router.bias_rate:
            checks.append(check_biases(truth, self.found, allowed, rate=router.bias_rate))
        return checks

    def _gradients(
        self, right: RunTrace, near: RunTrace, *, dtype: str = "float32", drifts: Drifts = None
    ) -> tuple[Check, Worst]:
        return check_tensors(
            "gradients", right.first_gradients, near.first_gradients,
            self.found.exact_gradients or self.found.first_gradients,
            rule=1, dtype=dtype, step=1, owners=self.found.owners, describe_rank=self._describe, drifts=drifts,
        )  # fmt: skip

    def _gradient_drifts(self) -> dict[str, float]:
        """Extra bounds where ranks round the terms of a sum: gradients and router choices differ before any update."""
        truth, same = self.references.truth.first_gradients, self.references.same.first_gradients
        return {
            key: tensor_drift(
                distance=TERM_DRAWS * distance_of(truth[key], low),
                norm=norm_of(low),
                roundoff=self._roundoff(),
                routed_update=norm_of(low) if has_experts(self.exercise) else 0.0,
            )
            for key, low in same.items()
        }

    def _rounded_updates(self) -> list[Check]:
        precision, exercise = plan_precision(self.plan, self.train), self.exercise
        if not (precision.rounds_moments or precision.rounds_weights):
            return []
        how = LowUpdate(
            train=self.train,
            clip_norm=exercise.clip_norm,
            rates=exercise.rates,
            rounds_moments=precision.rounds_moments,
            rounds_weights=precision.rounds_weights,
        )
        return [check_updates(how, self.found.initial, self.found.updates)]

    def _first_update(self, right: RunTrace, near: RunTrace) -> Check:
        """Check the first update against the truth's. Where gradients differ from the start it is recomputed from the
        plan's own: Adam moves a weight whose gradient is noise by the full rate in either direction, and one of a
        norm's 32 weights is a third of the update."""
        expected, rounded, share = right.first_weights, near.first_weights, self.references.allowance.update
        if self.references.allowance.is_at_once and not self._has_own_update:
            expected = rounded = one_update(self.exercise, self._own_gradients())
            share = NOISE_SHARE
        check, _ = check_tensors(
            "first update", expected, rounded, self.found.first_weights, rule=2, dtype="float32", step=1,
            initial=right.initial, owners=self.found.owners, describe_rank=self._describe, noise_share=share,
        )  # fmt: skip
        return check

    def _own_gradients(self) -> Tensors:
        """The plan's first gradients. A missing or misshapen one fails elsewhere; here the truth's replaces it."""
        truth, found = self.references.truth.first_gradients, self.found.first_gradients
        return {
            key: found[key] if key in found and found[key].shape == value.shape else value
            for key, value in truth.items()
        }

    @property
    def _has_own_update(self) -> bool:
        """Whether the update is not torch's optimizer at the end of a step. bfloat16 weights have their own check."""
        return self.plan.has_delayed_updates or plan_precision(self.plan, self.train).rounds_weights

    def _weights(self, right: RunTrace, near: RunTrace, *, drifts: Drifts = None) -> tuple[Check, Worst]:
        parameters = {key: value for key, value in self.found.weights.items() if key in self.found.initial}
        return check_tensors(
            "weights", right.weights, near.weights, parameters, rule=2, dtype="float32", step=self.steps,
            initial=right.initial, owners=self.found.owners, describe_rank=self._describe, drifts=drifts,
            noise_share=self.references.allowance.update,
        )  # fmt: skip

    def _states(self, right: RunTrace, near: RunTrace, *, drifts: Drifts = None) -> Check:
        # a checkpoint has states of zeros for parameters that never had a gradient; one process has none
        states = {key: value for key, value in self.found.optimizer.items() if key in right.optimizer or value.any()}
        owners = {key: self.found.owners.get(key.rpartition(".")[0], []) for key in states}
        if self.references.allowance.is_at_once:  # different weights have different gradients
            share, given = self.references.allowance.update, drifts or {}
            drifts = {key: given.get(key, 0.0) + share * norm_of(value) for key, value in right.optimizer.items()}
        check, _ = check_tensors(
            "optimizer state", right.optimizer, near.optimizer, states, rule=2, dtype="float32",
            step=self.steps, owners=owners, describe_rank=self._describe, drifts=drifts,
        )  # fmt: skip
        return check

    def _same_precision(self, reordered: RunTrace) -> Check:
        """Check against one process in the plan's own precision, within the effect of another order of sums."""
        is_at_once = self.references.allowance.is_at_once
        checks = self._first_step_checks(reordered) if is_at_once else self._all_step_checks(reordered)
        for check in checks:
            if check.finding is not None:
                place = ", ".join(text for text in (check.name, check.finding.coordinates) if text)
                return Check.failed("same precision", replace(check.finding, rule=6, coordinates=place))
        what = "the first step" if is_at_once else "losses, gradients, weights and states"
        return Check.passed("same precision", f"{what} of one process", margin=max(check.margin for check in checks))

    def _all_step_checks(self, reordered: RunTrace) -> list[Check]:
        truth, same, found = self.references.truth, self.references.same, self.found
        every, ends = list(range(1, self.steps + 1)), [1, self.steps]

        def scalars(what: str, key: str, steps: list[int]) -> Check:
            low = getattr(same, key)
            drifts = self._scalar_drifts(getattr(truth, key), low)
            if steps is every:
                drifts[0] = 0.0  # no rounding can flip before the first update
            near, value = getattr(reordered, key), getattr(found, key)
            return check_scalars(what, low, near, value, rule=6, steps=steps, drifts=drifts)

        return [
            scalars("loss", "losses", every),
            self._gradients(same, reordered)[0],
            scalars("gradient norm", "norms", every),
            self._weights(same, reordered, drifts=self._tensor_drifts(truth.weights, same.weights))[0],
            self._states(same, reordered, drifts=self._tensor_drifts(truth.optimizer, same.optimizer)),
            scalars("evaluation", "eval_losses", ends),
        ]

    def _first_step_checks(self, reordered: RunTrace) -> list[Check]:
        """Checks where ranks round the terms of a sum: runs differ from the start, later steps have only the truth."""
        truth, same, found, allowance = (
            self.references.truth,
            self.references.same,
            self.found,
            self.references.allowance,
        )

        low = same.losses[:1]
        drifts = self._scalar_drifts(truth.losses[:1], low)
        loss = check_scalars(
            "loss", low, reordered.losses[:1], found.losses[:1], rule=6, drifts=drifts, least=allowance.losses
        )
        gradients, _ = self._gradients(same, reordered, drifts=self._gradient_drifts())
        return [loss, gradients, self._first_norm()]

    def _first_norm(self) -> Check:
        """Check the first norm; where gradients travel as codes their error may lie along them."""
        same, found, own = self.references.same, self.found, self._own_gradients()
        gaps = [distance_of(own[key], value) for key, value in same.first_gradients.items()]
        bound = first_norm_bound(
            size=same.norms[0],
            gap=math.hypot(*gaps),
            along=found.norms[0] - same.norms[0],
            allowance=self.references.allowance,
            roundoff=self._roundoff(),
        )
        error = sum(one.error for one in found.coded)
        bound = replace(bound, floor=bound.floor + 2 * error * same.norms[0])
        return check_scalar("gradient norm", same.norms[0], found.norms[0], bound, rule=6, step=1)

    def _scalar_drifts(self, truth: list[float], same: list[float]) -> list[float]:
        roundoff = self._roundoff()
        return [
            scalar_drift(distance=distance, size=abs(low), roundoff=roundoff)
            for distance, low in zip(envelope(truth, same), same, strict=True)
        ]

    def _tensor_drifts(self, truth: Tensors, same: Tensors) -> dict[str, float]:
        roundoff = self._roundoff()
        return {
            key: tensor_drift(
                distance=distance_of(truth[key], low),
                norm=norm_of(low),
                roundoff=roundoff,
                routed_update=self._routed_update(key, low),
            )
            for key, low in same.items()
        }

    def _routed_update(self, key: str, low: torch.Tensor) -> float:
        """Distance that training moved a weight, or a state that began at zero; 0 in a model without experts."""
        initial = self.exercise.initial
        if not has_experts(self.exercise):
            return 0.0
        return distance_of(low, initial[key]) if key in initial else norm_of(low)

    def _roundoff(self) -> float:
        """Unit roundoff of the coarsest dtype in use."""
        precision = plan_precision(self.plan, self.train)
        compute = UNIT_ROUNDOFF[str(precision.compute).removeprefix("torch.")]
        codes = CODE_ROUNDOFF if precision.has_8bit_moments else 0.0
        products = UNIT_ROUNDOFF["float8_e4m3fn"] if precision.has_float8 else 0.0
        return max(compute, codes, products)

    def _describe(self, rank: int) -> str:
        return coordinates_of(self.plan, rank)

    def _rank_of_row(self, row: int) -> str:
        rows = len(self.exercise.batches[0]["labels"])
        return self._describe(row // (rows // self.plan.mesh.dp_degree))

    def _owner(self, name: str, row: int) -> str:
        rank = owner_of(self.found.owners.get(name), (row,))
        return f" on {self._describe(rank)}" if rank is not None else ""


def _by_step(values: Sequence[torch.Tensor | None]) -> Tensors:
    return {f"step {step}": value for step, value in enumerate(values, start=1) if value is not None}
