"""`check_schedule`: every reason why a schedule is illegal. Legal schedules of one step give the same gradients.

Rules: each stage runs each micro-batch forward once and backward once (B, or I and W), on its own rank, in an order
that can run; an update comes after its gradients; no forward reads weights before their update.
"""

from __future__ import annotations

from collections import Counter

from weft.schedule.actions import Action, Kind
from weft.schedule.schedule import Schedule
from weft.schedule.simulate import StageCosts, run
from weft.schedule.versions import newest_at_forward, versions_read


def check_schedule(schedule: Schedule) -> list[str]:
    """Reasons; empty if the schedule is legal. Later rules are checked only if the earlier ones hold."""
    return _check_shape(schedule) or [
        *_check_counts(schedule),
        *_check_order(schedule),
        *_check_progress(schedule),
        *_check_updates(schedule),
    ]


def _check_shape(schedule: Schedule) -> list[str]:
    reasons = []
    if len(schedule.ranks) != schedule.num_ranks:
        reasons.append(f"{schedule.num_ranks} ranks, but actions for {len(schedule.ranks)}")
    if len(schedule.stage_to_rank) != schedule.num_stages:
        reasons.append(f"{schedule.num_stages} stages, but {len(schedule.stage_to_rank)} are placed")
    if not set(schedule.stage_to_rank) <= set(range(schedule.num_ranks)):
        reasons.append(f"a stage is placed on a rank outside 0 .. {schedule.num_ranks - 1}")
    return reasons or [
        reason for rank, actions in enumerate(schedule.ranks) for reason in _check_place(schedule, rank, actions)
    ]


def _check_place(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> list[str]:
    reasons = []
    for action in actions:
        if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.window):
            reasons.append(f"rank {rank} has {action}, whose stage or micro-batch does not exist")
        elif schedule.stage_to_rank[action.stage] != rank:
            reasons.append(f"rank {rank} has {action}, whose stage is on rank {schedule.stage_to_rank[action.stage]}")
    return reasons


def _check_counts(schedule: Schedule) -> list[str]:
    counts = Counter(action for actions in schedule.ranks for action in actions)
    reasons = [f"{action} occurs {times} times" for action, times in counts.items() if times > 1]
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.window):
            forward, full, of_input, of_weight = (
                counts[Action(kind, stage, microbatch)] > 0 for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
            if not forward:
                reasons.append(f"stage {stage} never runs the forward of micro-batch {microbatch}")
            if (full, of_input, of_weight) not in ((True, False, False), (False, True, True)):
                found = [kind for kind, there in zip("BIW", (full, of_input, of_weight), strict=True) if there]
                reasons.append(
                    f"stage {stage} runs the backward of micro-batch {microbatch} as {'+'.join(found) or 'nothing'}: "
                    "needs B, or I and W"
                )
    return reasons


_BEFORE = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


def _check_order(schedule: Schedule) -> list[str]:
    """Check the order on one rank: F before B or I, I before W."""
    reasons = []
    for rank, actions in enumerate(schedule.ranks):
        seen: set[Action] = set()
        for action in actions:
            seen.add(action)
            before = _BEFORE.get(action.kind)
            if before is not None and action._replace(kind=before) not in seen:
                reasons.append(f"rank {rank} has {action} before {action._replace(kind=before)}")
    return reasons


def _check_progress(schedule: Schedule) -> list[str]:
    """Check for deadlocks."""
    outcome = run(schedule, StageCosts.uniform(schedule.num_stages))
    return [sentence for _, sentence in sorted(outcome.blocked.items())]


def _check_updates(schedule: Schedule) -> list[str]:
    period = schedule.update_period
    expected = list(range(period - 1, schedule.window, period)) if period else []
    reasons = []
    for stage, rank in enumerate(schedule.stage_to_rank):
        own = [action for action in schedule.ranks[rank] if action.stage == stage]
        updates = [action.microbatch for action in own if action.kind is Kind.U]
        if updates != expected:
            reasons.append(f"stage {stage} updates after micro-batches {updates}, its weight rule requires {expected}")
        reasons += _check_gradients(own)
    return reasons + _check_versions(schedule)


def _check_gradients(own: list[Action]) -> list[str]:
    """Check that an update comes after all gradients up to its micro-batch, and before any later one."""
    finished: set[int] = set()
    reasons = []
    for action in own:
        if action.kind in (Kind.B, Kind.W):
            finished.add(action.microbatch)
        elif action.kind is Kind.U and finished != set(range(action.microbatch + 1)):
            reasons.append(f"{action} comes after the gradients of micro-batches {sorted(finished)}")
    return reasons


def _check_versions(schedule: Schedule) -> list[str]:
    if schedule.is_synchronous:
        return []
    newest, read = newest_at_forward(schedule), versions_read(schedule)
    return [
        f"{Action(Kind.F, stage, microbatch)} reads weight version {version}, "
        f"but the newest of the stage is {newest[stage][microbatch]}"
        for stage, versions in enumerate(read)
        for microbatch, version in enumerate(versions)
        if version > newest[stage][microbatch]
    ]
