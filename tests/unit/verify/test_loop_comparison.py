"""A run of the training loop passes as the truth does, or as a run that chose another of two nearly tied experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.verify.loop_comparison import against_references
from weft.verify.near_ties import Perturbation
from weft.verify.references import References
from weft.verify.run_trace import RunTrace, Tensors
from weft.verify.verdict import Check

LAYER, EXPERT = "layers.0.mlp.experts", "layers.0.mlp.experts.up_proj"
INITIAL: Tensors = {EXPERT: torch.zeros(8, dtype=torch.float64)}
WEIGHTS: Tensors = {EXPERT: torch.ones(8, dtype=torch.float64)}
ONE, OTHER = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [0, 3]])
TRUTH = RunTrace(
    losses=[5.7, 5.6, 5.5], norms=[2.5, 2.7, 2.4], weights=WEIGHTS, initial=INITIAL,
    choices=[{LAYER: ONE}, {LAYER: ONE}, {LAYER: ONE}],
)  # fmt: skip
TIED = replace(
    TRUTH, norms=[2.5, 2.7, 2.4001], weights={EXPERT: 1.03 * WEIGHTS[EXPERT]},
    choices=[{LAYER: ONE}, {LAYER: ONE}, {LAYER: OTHER}],
)  # fmt: skip
ROUNDED = 1 + 1e-7


def rounded(trace: RunTrace, **changes: object) -> RunTrace:
    near = replace(trace, losses=[value * ROUNDED for value in trace.losses])
    return replace(near, **changes)  # type: ignore[arg-type]


def judged(found: RunTrace, *, has_experts: bool = True) -> tuple[Check, list[Perturbation]]:
    asked: list[Perturbation] = []

    def perturbed(perturbation: Perturbation) -> RunTrace:
        """The tie is so near that the smallest movement of one draw crosses it."""
        asked.append(perturbation)
        return TIED if perturbation.draw == 2 else TRUTH

    references = References(truth=TRUTH, same=rounded(TRUTH), perturbed=perturbed if has_experts else None)
    return against_references("training loop", references, found, frozenset(), saved=[EXPERT]), asked


def test_the_truth_passes_without_further_runs() -> None:
    check, asked = judged(rounded(TRUTH))
    assert (check.ok, asked) == (True, [])


def test_another_choice_between_tied_experts_passes_as_a_run_that_makes_it() -> None:
    check, asked = judged(rounded(TIED))
    assert check.ok
    assert check.detail.endswith("another choice between nearly tied experts in step 3")
    assert len(asked) == 3, "the first that chooses otherwise is the answer"


def test_a_dense_model_has_no_ties() -> None:
    check, asked = judged(rounded(TIED), has_experts=False)
    assert (check.ok, asked) == (False, [])


def test_other_numbers_fail_against_the_truth() -> None:
    """A norm between both, a loss of neither, or weights of one run beside norms of the other."""
    for wrong in (
        rounded(TRUTH, norms=[2.5, 2.7, 2.40005]),
        rounded(TIED, losses=[5.7, 5.6, 5.501]),
        rounded(TIED, weights=WEIGHTS),
        rounded(TIED, norms=[2.5, 2.7001, 2.4001]),
    ):
        check, _ = judged(wrong)
        assert not check.ok
        assert check.finding is not None
        assert check.finding.expected.startswith(("2.4 ", "5.5 ", "2.7 "))
