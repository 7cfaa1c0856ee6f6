"""Checks of a mixture: loads of experts, drops over their capacity, biases of the choice.

    load    as many choices as in one process, exactly; of each expert the same, but for choices that rounding changes
    drops   the same, but for those
    bias    moved as the plan's own loads say, exactly; unlike the reference's only where a load was so near the mean
            that those choices explain it

Choices that rounding changes are counted: where one process in the plan's precision chooses otherwise than the truth.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.verify.evidence import Evidence
from weft.verify.near_ties import flips
from weft.verify.run_trace import RunTrace, Tensors
from weft.verify.verdict import Check, Finding

LOAD, DROPS, BIAS, RULE = "expert load", "dropped choices", "router bias", 13
LEAST, DRAWS = 2, 2  # a plan rounds otherwise than one process: choices of its own, beside twice those counted


def allowed_choices(truth: RunTrace, same: RunTrace) -> list[int]:
    """Choices by step that may differ: twice the flips of all layers and steps so far, and a few."""
    return [LEAST + DRAWS * total for total in itertools.accumulate(flips(truth, same))]


def check_loads(truth: RunTrace, found: Evidence, allowed: Sequence[int]) -> Check:
    """Choices of each expert, by layer and step."""
    most = 0
    for step, (choices, loads) in enumerate(zip(truth.choices, found.loads, strict=True)):
        for name, load in loads.items():
            if name not in choices:
                continue
            right = _counts(choices[name], len(load))
            moved = int((load - right).abs().sum()) // 2
            most = max(most, moved)
            if int(load.sum()) != int(right.sum()) or moved > allowed[step]:
                return _differs(LOAD, name, step, f"{_listed(right)} choices", f"{_listed(load)}")
    layers, known = len(found.loads[0]), len(found.loads[0].keys() & truth.choices[0].keys())
    of = _of(layers, "layer") if known == layers else f"{known} of {layers} layers, the reference knows no others"
    return Check.passed(LOAD, f"{of}: as in one process, up to {_of(most, 'choice')} in a layer and step")


def check_drops(truth: RunTrace, found: Evidence, allowed: Sequence[int]) -> Check:
    """Choices over capacity, by layer and step."""
    for step, (right, drops) in enumerate(zip(truth.drops, found.drops, strict=True)):
        for name in sorted({*right, *drops}):
            expected, value = right.get(name), drops.get(name)
            if expected is None or value is None or abs(expected - value) > allowed[step]:
                return _differs(DROPS, name, step, f"{expected} choices dropped", f"{value}")
    total = sum(sum(drops.values()) for drops in found.drops)
    return Check.passed(DROPS, f"{_of(total, 'choice')} over capacity, counted as in one process")


def check_biases(truth: RunTrace, found: Evidence, allowed: Sequence[int], *, rate: float) -> Check:
    odd = 0
    for name, right in truth.biases.items():
        value = found.biases.get(name)
        if value is None or value.numel() != right.numel():
            return Check.failed(BIAS, Finding(rule=RULE, parameter=name, expected="a bias", found="none"))
        right, value = right.double().flatten(), value.double().flatten()
        initial = right - _moves(truth.bias_loads, name, rate=rate)
        own = initial + _moves(found.bias_loads, name, rate=rate)
        differs = (value - right).abs() > rate / 2
        wrong = ((value - own).abs() > rate / 2) | (differs & ~_is_explained(truth.bias_loads, name, allowed))
        if bool(wrong.any()):
            expert = int(wrong.nonzero()[0])
            finding = Finding(
                rule=RULE,
                parameter=name,
                coordinates=f"expert {expert}",
                expected=f"{own[expert]:.6g} by its loads, {right[expert]:.6g} in one process",
                found=f"{value[expert]:.6g}",
            )
            return Check.failed(BIAS, finding)
        odd += int(differs.sum())
    if not truth.biases:
        return Check.passed(BIAS, "none is moved")
    near = f"; {_of(odd, 'expert')} with a load at the mean moved otherwise" if odd else ""
    return Check.passed(BIAS, f"{len(truth.biases)} moved as in one process{near}")


def _moves(loads: Sequence[Tensors], name: str, *, rate: float) -> Tensor:
    moves = [rate * torch.sign(load[name].mean() - load[name]) for load in loads if name in load]
    return torch.stack(moves).sum(0) if moves else torch.zeros(())


def _is_explained(loads: Sequence[Tensors], name: str, allowed: Sequence[int]) -> Tensor:
    """Experts whose load was once so near the mean that choices which rounding changes move it across."""
    near = [
        (load[name] - load[name].mean()).abs() <= most
        for load, most in zip(loads, allowed, strict=True)
        if name in load
    ]
    return torch.stack(near).any(0) if near else torch.zeros((), dtype=torch.bool)


def _counts(choices: Tensor, num_experts: int) -> Tensor:
    chosen = choices.flatten()
    return torch.bincount(chosen[chosen < num_experts].long(), minlength=num_experts).double()


def _differs(check: str, layer: str, step: int, expected: str, found: str) -> Check:
    return Check.failed(check, Finding(rule=RULE, parameter=layer, step=step + 1, expected=expected, found=found))


def _listed(counts: Tensor) -> str:
    return str([int(count) for count in counts])


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
