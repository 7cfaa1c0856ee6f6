"""A budget of recompute in a model made small: of each sort of block as many as there were, in proportion, or one.

What a budget leaves open depends on memory and changes no number; the proof must hold whatever is chosen. So an open
one is verified with blocks of every sort, whatever this machine's memory would have chosen.
"""

from __future__ import annotations

from weft.core.plan import Plan, require_mixture, with_mixture
from weft.core.run_spec import RunSpec
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe

Mixture = tuple[int, int]


def shrink_mixture(plan: Plan, *, whole: RunSpec, small: RunSpec, vocab_size: int) -> tuple[Plan, list[str]]:
    """The plan for the small run, and what was changed, in words."""
    if plan.activations.policy != "budget":
        return plan, []
    blocks = num_blocks(small, vocab_size=vocab_size)
    given = plan.activations.mixture
    if given is None:
        chosen = every_sort(blocks, may_select=not plan.compile.enabled)
        return with_mixture(plan, chosen), [f"activations.mixture: open, so one with every sort: {list(chosen)}"]
    whole_blocks = num_blocks(whole, vocab_size=vocab_size)
    require_mixture(plan, num_blocks=whole_blocks)  # shrinking must not make a run legal
    chosen = in_proportion(given, whole=whole_blocks, small=blocks)
    told = [f"activations.mixture {list(given)} -> {list(chosen)}"] if chosen != given else []
    return with_mixture(plan, chosen), told


def every_sort(blocks: int, *, may_select: bool) -> Mixture:
    """A third each of blocks computed again fully, selectively, and kept; halves where none may be selective."""
    return (max(1, blocks // 3), blocks // 3) if may_select else (max(1, blocks // 2), 0)


def in_proportion(given: Mixture, *, whole: int, small: int) -> Mixture:
    """`given`, of `whole` blocks, for `small` ones; each sort that there was keeps a block while there are enough."""
    full, selective = given
    has_rest = full + selective < whole

    def share(count: int, *, others: int) -> int:
        return max(0, min(max(1, round(count * small / whole)), small - others)) if count else 0

    fewer_full = share(full, others=(selective > 0) + has_rest)
    if not has_rest:
        return (fewer_full, small - fewer_full) if selective else (small, 0)
    return fewer_full, share(selective, others=fewer_full + 1)


def num_blocks(run: RunSpec, *, vocab_size: int) -> int:
    """Of the model, as the engine finds them."""
    return len(describe(build_skeleton(build_config(run.model, vocab_size=vocab_size))).blocks)
