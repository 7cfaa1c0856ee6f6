"""Checks of loads, drops and biases: what rounding explains passes, one expert moved wrongly does not."""

from __future__ import annotations

import torch

from weft.verify.evidence import Evidence
from weft.verify.expert_checks import LEAST, allowed_choices, check_biases, check_drops, check_loads
from weft.verify.run_trace import RunTrace

LAYER, BIAS, RATE = "layers.0.experts", "layers.0.gate.bias", 1e-3
CHOICES = torch.tensor([[0, 1]] * 12 + [[0, 2]] * 6 + [[3, 2]] * 6)  # 18, 12, 12 and 6 of a mean of 12
COUNTS = torch.tensor([18.0, 12.0, 12.0, 6.0], dtype=torch.float64)


def trace(choices: torch.Tensor = CHOICES, drops: int = 5) -> RunTrace:
    return RunTrace(choices=[{LAYER: choices}], drops=[{LAYER: drops}])


def found(counts: torch.Tensor, drops: int = 5) -> Evidence:
    return Evidence(loads=[{LAYER: counts.double()}], drops=[{LAYER: drops}])


def with_choices(flips: int) -> torch.Tensor:
    """As CHOICES, with other experts for the first tokens."""
    changed = CHOICES.clone()
    changed[:flips, 1] = 3
    return changed


def test_the_allowance_counts_choices_that_rounding_changes() -> None:
    assert allowed_choices(trace(), trace()) == [LEAST]
    assert allowed_choices(trace(), trace(with_choices(3))) == [LEAST + 6]
    assert allowed_choices(trace(), trace(CHOICES.flip(1))) == [LEAST], "the order of a token's experts is none"


def test_flips_of_later_steps_add_up() -> None:
    truth, same = (
        RunTrace(choices=[{LAYER: CHOICES}] * 3),
        RunTrace(choices=[{LAYER: with_choices(n)} for n in (1, 0, 2)]),
    )
    assert allowed_choices(truth, same) == [LEAST + 2, LEAST + 2, LEAST + 6]


def test_loads_may_differ_by_the_allowance_alone() -> None:
    near = COUNTS + torch.tensor([-2, 2, 0, 0])
    assert check_loads(trace(), found(COUNTS), [2]).ok
    check = check_loads(trace(), found(near), [2])
    assert check.ok
    assert "up to 2 choices" in check.detail
    assert not check_loads(trace(), found(near), [1]).ok


def test_a_total_is_never_off() -> None:
    for wrong in (COUNTS * 2, COUNTS + torch.tensor([1, 0, 0, 0])):
        check = check_loads(trace(), found(wrong), [1000])
        assert not check.ok
        assert check.finding is not None
        assert (check.finding.step, check.finding.parameter) == (1, LAYER)


def test_a_layer_without_a_reference_is_named() -> None:
    evidence = Evidence(loads=[{LAYER: COUNTS, "layers.1.other": COUNTS}])
    assert "1 of 2 layers, the reference knows no others" in check_loads(trace(), evidence, [0]).detail


def test_drops() -> None:
    assert check_drops(trace(), found(COUNTS, 7), [2]).ok
    assert not check_drops(trace(), found(COUNTS, 0), [2]).ok
    assert not check_drops(trace(), Evidence(drops=[{}]), [1000]).ok, "not counted at all"


def biased(counts: torch.Tensor, moves: list[int], kind: type[RunTrace] = RunTrace) -> RunTrace:
    value = 0.5 + RATE * torch.tensor(moves, dtype=torch.float32)
    return kind(biases={BIAS: value}, bias_loads=[{BIAS: counts.double()}])


TRUTH = biased(COUNTS, [-1, 0, 0, 1])


def judged(counts: torch.Tensor, moves: list[int], allowed: int) -> str:
    evidence = biased(counts, moves, Evidence)
    assert isinstance(evidence, Evidence)
    check = check_biases(TRUTH, evidence, [allowed], rate=RATE)
    return check.detail if check.ok else f"FAIL {check.detail}"


def test_the_same_biases_pass() -> None:
    assert judged(COUNTS, [-1, 0, 0, 1], 0) == "1 moved as in one process"


def test_an_expert_at_the_mean_may_move_otherwise_and_is_counted() -> None:
    near = COUNTS + torch.tensor([0, 1, -1, 0])
    assert "2 experts with a load at the mean moved otherwise" in judged(near, [-1, -1, 1, 1], 1)


def test_one_expert_moved_the_wrong_way_fails_at_any_allowance() -> None:
    for allowed in (0, 1000):
        assert judged(COUNTS, [1, 0, 0, 1], allowed).startswith(f"FAIL {BIAS}, expert 0")
        assert judged(COUNTS, [-1, 1, 0, 1], allowed).startswith(f"FAIL {BIAS}, expert 1")


def test_loads_that_rounding_does_not_explain_fail() -> None:
    """The biases follow the plan's own loads, which are wrong."""
    other = torch.tensor([6.0, 12.0, 12.0, 18.0])
    assert judged(other, [1, 0, 0, -1], 5).startswith("FAIL")


def test_a_late_bias_fails() -> None:
    assert judged(COUNTS, [0, 0, 0, 0], 1000).startswith("FAIL")
