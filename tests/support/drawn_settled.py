"""Drawn cases settled before ranks start: legal at once, legal by following hints, or refused; and what is wrong then.

settled = settle(draw_case(seed, corpus, chats))
"""

from __future__ import annotations

from dataclasses import dataclass

from drawn import Case, follow

from weft.core.errors import InputError, WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.ask import estimate_plan
from weft.plan.resolve import resolve
from weft.verify.refusals import require_comparable

MOST_HINTS = 12


@dataclass(frozen=True)
class Settled:
    """`legal` is None for a case whose last hint names no setting in full; `wrong` says which promise was broken."""

    legal: Case | None
    refusals: tuple[WeftError, ...] = ()
    wrong: str = ""


def refusal_of(case: Case) -> WeftError | None:
    """What `weft verify` refuses before ranks start."""
    try:
        run = RunSpec.from_tables(case.run)
        resolve(case.plan, run, on_gpu=False)
        require_comparable(run)
    except WeftError as error:
        return error
    return None


def settle(case: Case) -> Settled:
    """Follow hints until the case is legal. Every refusal has a hint, which lifts it."""
    refusals: list[WeftError] = []
    while (error := refusal_of(case)) is not None:
        if not isinstance(error, InputError) or not error.hint:
            return Settled(None, (*refusals, error), f"a refusal without a hint: {error.code} {error.message}")
        if error.message in [before.message for before in refusals] or len(refusals) == MOST_HINTS:
            return Settled(None, tuple(refusals), f"hints do not lift {error.message!r}: {error.hint}")
        refusals.append(error)
        followed = follow(case, error.hint)
        if followed is None:
            return Settled(None, tuple(refusals))
        case = followed
    return Settled(case, tuple(refusals), why_not_planned(case))


def why_not_planned(case: Case) -> str:
    """Why `weft plan --plan` refuses what `weft train` starts, or ""."""
    run = RunSpec.from_tables(case.run)
    plan = resolve(case.plan, run, on_gpu=False)
    try:
        estimate_plan(run, plan, f"{plan.num_ranks}xCPU")
    except WeftError as error:
        return f"weft plan refuses what weft train starts: {error.message}"
    return ""


def steps_of(case: Case, least: int = 3) -> int:
    """Steps that show what the plan does: updates that are delayed are judged once the pipeline is full."""
    plan = Plan.from_tables(case.plan)
    return max(least, 4 + 2 * plan.mesh.pp) if plan.has_delayed_updates else least
