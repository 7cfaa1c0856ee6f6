"""Closed forms of every schedule, for stages of equal cost and free sends, for planners that evaluate thousands.

Plain arithmetic: the counts may be ints or arrays of ints, elementwise. Tests compare every form with `simulate`.
share = idle / (m*v*(F+I+W) + idle), F, I, W being one stage's costs, B = I+W, and idle, per rank:

    naive                        (p-1) * m * (F+B)
    gpipe, 1f1b                  (p-1) * (F+B)                                          as published
    interleaved_1f1b, looped_bfs (p-1 + (v-1) * max(0, p-m)) * (F+B)                    published for m >= p
    zero_bubble                  (p-1) * (F+I-c) + max(0, p-m) * c,  c = min(F, I, W)   published for m >= p, c = W
    zbv                          max(p-1, 4(p-1) - 2(m-1)) * F                          F = I = W only
    dualpipev                    (p-1) * F                                              F = I = W only
    pipedream, pipedream_2bw     (p-1) * (F+B) once per window, 0 in the long run
"""

from __future__ import annotations

from typing import Any, Final

from weft.schedule.registry import SPECS, spec_of
from weft.schedule.schedule import WeightRule

Count = Any  # an int, or an array of ints
Value = Any  # a number, or an array of numbers

NEVER_DRAIN: Final = frozenset(name for name, spec in SPECS.items() if spec.weight_rule is not WeightRule.FLUSH)
EQUAL_COSTS_ONLY: Final = frozenset({"zbv", "dualpipev"})  # no closed form for other costs: use `simulate`


def _least(a: Value, b: Value) -> Value:
    """min, elementwise: `min` itself would compare full arrays. Integers stay integers."""
    return a - _excess(a, b)


def _most(a: Value, b: Value) -> Value:
    return b + _excess(a, b)


def _excess(a: Value, b: Value) -> Value:
    """max(0, a - b). Multiplied by a truth value rather than halved, so that integers stay integers."""
    return (a - b) * (a > b)


def idle_s(
    name: str,
    *,
    num_ranks: Count,
    num_microbatches: Count,
    virtual_stages: Count = 1,
    forward_s: float = 1,
    backward_input_s: float = 1,
    backward_weight_s: float = 1,
) -> Value:
    """Idle time of each rank per step (per window for schedules that never drain): makespan minus its work."""
    spec_of(name)  # an unknown name must not get the values of 1F1B
    others, few = num_ranks - 1, _excess(num_ranks, num_microbatches)
    full_s = forward_s + backward_input_s + backward_weight_s
    if name in EQUAL_COSTS_ONLY and not forward_s == backward_input_s == backward_weight_s:
        raise ValueError(f"{name} has no closed form for unequal costs: use simulate()")
    if name == "naive":
        return others * num_microbatches * full_s
    if name in ("interleaved_1f1b", "looped_bfs"):
        return (others + (virtual_stages - 1) * few) * full_s
    if name == "zero_bubble":
        movable_s = min(forward_s, backward_input_s, backward_weight_s)
        return others * (forward_s + backward_input_s - movable_s) + few * movable_s
    if name == "zbv":
        return _most(others, 4 * others - 2 * (num_microbatches - 1)) * forward_s
    if name == "dualpipev":
        return others * forward_s
    return others * full_s


def bubble_share(
    name: str,
    *,
    num_ranks: Count,
    num_microbatches: Count,
    virtual_stages: Count = 1,
    forward_s: float = 1,
    backward_input_s: float = 1,
    backward_weight_s: float = 1,
    num_steps: int | None = None,
) -> Value:
    """Idle time over all time. `num_steps`: the window of a schedule that never drains; None for the long run."""
    if name in NEVER_DRAIN and num_steps is None:
        return 0.0 * num_ranks * num_microbatches
    idle = idle_s(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
    )
    full_s = forward_s + backward_input_s + backward_weight_s
    return idle / (num_microbatches * (num_steps or 1) * virtual_stages * full_s + idle)


def stage_in_flight(
    name: str,
    *,
    stage: Count,
    num_ranks: Count,
    num_microbatches: Count,
    virtual_stages: Count = 1,
    until_weight: bool = True,
) -> Count:
    """The most micro-batches that `stage` holds at once, from F until W (or B); or only until I."""
    spec_of(name)  # an unknown name must not get the values of 1F1B
    if name == "naive":
        return 1 + 0 * stage * num_microbatches
    if name in ("gpipe", "looped_bfs"):
        return num_microbatches + 0 * stage
    if name == "interleaved_1f1b":
        return _interleaved_stage(stage, num_ranks, num_microbatches, virtual_stages)
    if name in ("zbv", "dualpipev"):
        return _least(num_microbatches, 2 * num_ranks - stage)
    if name == "zero_bubble" and until_weight:
        return _least(num_microbatches, num_ranks + 0 * stage)
    if name in NEVER_DRAIN:
        return num_ranks - stage
    return _least(num_microbatches, num_ranks - stage)


def rank_in_flight(
    name: str,
    *,
    rank: Count,
    num_ranks: Count,
    num_microbatches: Count,
    virtual_stages: Count = 1,
    until_weight: bool = True,
) -> Count:
    """The most (stage, micro-batch) pairs that `rank` holds at once, over all its stages."""
    if name == "looped_bfs":
        return num_microbatches * virtual_stages + 0 * rank
    if name == "interleaved_1f1b":
        slots = num_microbatches * virtual_stages
        return _least(slots, _forwards_ahead(rank, num_ranks, num_microbatches, virtual_stages) + 1)
    if name == "zbv":
        both_legs = _least(num_microbatches, 2 * num_ranks - rank) + _least(num_microbatches, rank + 1)
        return _least(2 * num_ranks, both_legs)
    if name == "dualpipev":
        return _least(2 * num_microbatches, 2 * num_ranks + 1) + 0 * rank
    return stage_in_flight(
        name,
        stage=rank,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        until_weight=until_weight,
    )


def _round_size(num_ranks: Count, num_microbatches: Count) -> Count:
    """Micro-batches in a round of interleaved 1F1B."""
    return num_microbatches // _most(1, num_microbatches // num_ranks)


def _forwards_ahead(rank: Count, num_ranks: Count, num_microbatches: Count, virtual_stages: Count) -> Count:
    per_round = _round_size(num_ranks, num_microbatches)
    ahead = 2 * (num_ranks - 1 - rank) + (virtual_stages - 1) * per_round
    return _least(num_microbatches * virtual_stages, ahead)


def _interleaved_stage(stage: Count, num_ranks: Count, num_microbatches: Count, virtual_stages: Count) -> Count:
    """A stage holds most when it ends its visit of a round; from the second round on it repeats."""
    per_round = _round_size(num_ranks, num_microbatches)
    chunk, rank = stage // num_ranks, stage % num_ranks
    ahead = _forwards_ahead(rank, num_ranks, num_microbatches, virtual_stages)

    def held_after(round_index: Count) -> Count:
        slots = (round_index * virtual_stages + chunk + 1) * per_round
        backwards = _excess(slots - 1, ahead)
        rounds, rest = backwards // (per_round * virtual_stages), backwards % (per_round * virtual_stages)
        own = rounds * per_round + _least(per_round, _excess(rest, (virtual_stages - 1 - chunk) * per_round))
        return (round_index + 1) * per_round - own

    second = _least(1, num_microbatches // per_round - 1)
    return _most(held_after(0), held_after(second))


def weight_versions(name: str, *, stage: Count, num_ranks: Count) -> Count:
    """Copies of its weights that a stage keeps, in the long run."""
    spec_of(name)  # an unknown name must not get the values of 1F1B
    if name == "pipedream":
        return num_ranks - stage
    return (2 if name == "pipedream_2bw" else 1) + 0 * stage
