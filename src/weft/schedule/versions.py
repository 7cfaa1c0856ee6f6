"""Weight versions: the one that each micro-batch reads, the number that a stage keeps, the staleness of gradients.

Version v has had v updates. It is kept from the update that made it until the next update, or until the last
backward that reads it. PipeDream: stage s of p keeps p-s, staleness p-1-s; 2BW: 2 and 1; with a flush: 1 and 0.
"""

from __future__ import annotations

from weft.schedule.actions import Action, Kind
from weft.schedule.schedule import Schedule, WeightRule


def version_for(schedule: Schedule, *, stage: int, microbatch: int) -> int:
    """The version that `stage` reads for a micro-batch, for any number of steps: `versions_read` without end."""
    rule, last = schedule.weight_rule, schedule.num_stages - 1
    if rule is WeightRule.FLUSH:
        return 0
    if rule is WeightRule.DOUBLE_BUFFER:
        return max(microbatch // schedule.num_microbatches - 1, 0)
    return max(microbatch - (last - stage if rule is WeightRule.STASH else last), 0)


def newest_at_forward(schedule: Schedule) -> list[list[int]]:
    """[stage][microbatch] -> updates the stage has made before that forward."""
    newest = [[0] * schedule.window for _ in range(schedule.num_stages)]
    for actions in schedule.ranks:
        updates = [0] * schedule.num_stages
        for kind, stage, microbatch in actions:
            if kind is Kind.U:
                updates[stage] += 1
            elif kind is Kind.F:
                newest[stage][microbatch] = updates[stage]
    return newest


def versions_read(schedule: Schedule) -> list[list[int]]:
    """[stage][microbatch] -> the version that its forward and its backward both read."""
    rule, stages = schedule.weight_rule, range(schedule.num_stages)
    if rule is WeightRule.FLUSH:
        return [[0] * schedule.window for _ in stages]
    if rule is WeightRule.DOUBLE_BUFFER:
        steps = [microbatch // schedule.num_microbatches for microbatch in range(schedule.window)]
        return [[max(step - 1, 0) for step in steps] for _ in stages]
    newest = newest_at_forward(schedule)
    return newest if rule is WeightRule.STASH else [list(newest[0]) for _ in stages]


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """The most versions that each stage keeps at once."""
    if schedule.is_synchronous:
        return (1,) * schedule.num_stages
    read = versions_read(schedule)
    return tuple(
        _max_alive([action for action in schedule.ranks[rank] if action.stage == stage], read[stage])
        for stage, rank in enumerate(schedule.stage_to_rank)
    )


def _max_alive(actions: list[Action], read: list[int]) -> int:
    """The most versions alive at one position of a stage's own order; an update in place needs no second copy."""
    made_at = [0, *(index for index, action in enumerate(actions) if action.kind is Kind.U)]
    dies_at = [*made_at[1:], len(actions)]
    for index, action in enumerate(actions):
        if action.kind in (Kind.B, Kind.W):
            version = read[action.microbatch]
            dies_at[version] = max(dies_at[version], index)
    changes = sorted([(index, 1) for index in made_at] + [(index, -1) for index in dies_at])
    alive = most = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return most


def staleness(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most updates between the version of a gradient and the version it is applied to."""
    if schedule.is_synchronous:
        return (0,) * schedule.num_stages
    read, period = versions_read(schedule), schedule.update_period
    return tuple(
        max(microbatch // period - version for microbatch, version in enumerate(versions)) for versions in read
    )
