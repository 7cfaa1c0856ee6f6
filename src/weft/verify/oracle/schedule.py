"""The learning rate by its documented formula, compared with the run's own over its full length.

With w warm-up steps of n and final ratio f, in step s from 1: peak s/w for s <= w; then, with x = (s - w)/(n - w),
peak (f + (1 - f) (1 + cos(pi x))/2) for cosine, peak (f + (1 - f) (1 - x)) for linear, peak for constant,
peak sqrt(max(w, 1)/s) for inverse_sqrt. wsd has the peak until its decay, whose last step is n and whose length is
round(decay_share n), or less where the warm-up reaches into it; there it is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from weft.verify.oracle.facts import Tables
from weft.verify.verdict import Check, Finding

NAME, RULE = "oracle schedule", 12
MOST_STEPS = 20_000  # of a longer run this many steps are checked, evenly spaced
TOLERANCE = 1e-9  # relative; both sides are a few float64 operations


def rate_of(train: Tables, step: int) -> float:
    peak, steps = float(train["learning_rate"]), int(train["steps"])
    warmup, final = min(int(train["warmup_steps"]), steps), float(train["final_learning_rate_ratio"])
    if step <= warmup:
        return peak * step / warmup
    if train["schedule"] == "constant":
        return peak
    if train["schedule"] == "inverse_sqrt":
        return peak / math.sqrt(step / max(warmup, 1))
    length = steps - warmup
    if train["schedule"] == "wsd":
        length = min(length, round(float(train["decay_share"]) * steps))
        if step <= steps - length:
            return peak
    x = 1.0 - (steps - step) / length
    if train["schedule"] in ("linear", "wsd"):
        return peak * (final + (1.0 - final) * (1.0 - x))
    return peak * (final + (1.0 - final) * (1.0 + math.cos(math.pi * x)) / 2.0)


def check_schedule(run: Tables, rate: Callable[[int], float], loop_run: Tables, recorded: Sequence[float]) -> Check:
    """Compare the run's rates over its full length, and those that the loop recorded in its few steps."""
    train = run["train"]
    steps = list(_checked_steps(int(train["steps"])))
    wrong = _first_wrong(train, ((step, rate(step)) for step in steps), place="of the full run")
    wrong = wrong or _first_wrong(loop_run["train"], enumerate(recorded, start=1), place="recorded by the loop")
    if wrong is not None:
        return Check.failed(NAME, wrong)
    detail = f"{train['schedule']} with {train['warmup_steps']} warm-up steps, {len(steps)} of {train['steps']} steps"
    return Check.passed(NAME, f"{detail}, and the {len(recorded)} that the loop recorded")


def _checked_steps(steps: int) -> Iterable[int]:
    if steps <= MOST_STEPS:
        return range(1, steps + 1)
    return sorted({1, steps, *(1 + (steps - 1) * part // MOST_STEPS for part in range(MOST_STEPS))})


def _first_wrong(train: Tables, rates: Iterable[tuple[int, float]], *, place: str) -> Finding | None:
    for step, found in rates:
        expected = rate_of(train, step)
        if not abs(found - expected) <= TOLERANCE * float(train["learning_rate"]):
            return Finding(
                rule=RULE, step=step, coordinates=place,
                expected=f"a rate of {expected:.9g} ({train['schedule']})", found=f"{found:.9g}",
            )  # fmt: skip
    return None
