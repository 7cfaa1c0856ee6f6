"""Groups of bugs for the mutation campaigns: what a bug is, its group on ranks, and what must be said of it.

A group shares its ranks and its references. The code as it is comes first and must pass; else being caught means
nothing. A survivor, or a bug blamed on the wrong check, is a complaint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gloo_ranks import run_ranks
from verify_ranks import Tables, mutated_verdicts_in_rank, small_run

STEPS = 4
LIMIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A mutation, the check that must name it (or one of several), and words that the check's detail must hold."""

    mutate: Callable[[], Any]
    check: str | tuple[str, ...]
    words: tuple[str, ...] = ()
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    plan: Tables
    bugs: tuple[Bug, ...]
    model: str = "llama"
    train: Tables | None = None
    data: Tables | None = None
    router: Tables | None = None
    objective: Tables | None = None
    num_ranks: int = 2


def require_caught(group: Group, corpus: Path, scratch: Path) -> None:
    """Every bug of the group is caught by the check that is about it."""
    verdicts = run_ranks(try_in_rank, group.num_ranks, group, str(corpus), str(scratch), timeout_s=LIMIT_S)[0]
    healthy = verdicts.pop("")
    assert healthy["ok"], healthy["checks"]
    complaints = {bug.mutate.__name__: complaint(bug, verdicts[bug.mutate.__name__]) for bug in group.bugs}
    wrong = {bug: text for bug, text in complaints.items() if text}
    assert not wrong, wrong


def try_in_rank(rank: int, _world: int, group: Group, corpus: str, scratch: str) -> dict[str, Tables]:
    run = small_run(
        corpus, model=group.model, train=group.train, data=group.data, router=group.router, objective=group.objective
    )
    named = {bug.mutate.__name__: bug.mutate for bug in group.bugs}
    return mutated_verdicts_in_rank(rank, run, group.plan, scratch, named, steps=STEPS)


def complaint(bug: Bug, verdict: Tables) -> str | None:
    """What is wrong with the verdict on a bug, if anything."""
    if verdict["ok"]:
        return "survived"
    named = verdict["first_wrong"]
    detail = next(check["detail"] for check in verdict["checks"] if check["name"] == named)
    finding = next(check["finding"] for check in verdict["checks"] if check["name"] == named)
    if named not in ((bug.check,) if isinstance(bug.check, str) else bug.check):
        return f"blamed on {named!r}, not on {bug.check!r}: {detail}"
    missing = [word for word in bug.words if word not in detail]
    if missing:
        return f"{missing} not in {detail!r}"
    if bug.step is not None and finding["step"] != bug.step:
        return f"step {finding['step']}, not {bug.step}: {detail}"
    return None
