"""The recompute mixture of a shrunk model: the share of blocks per policy stays, with at least one block each.

A mixture that the plan leaves open depends on memory and changes no number; verification must hold for any choice. So
an open mixture is verified with blocks of every policy, independent of this machine's memory.
"""

from __future__ import annotations

from weft.core.mixture import block_policies
from weft.core.open_choices import require_mixture, with_mixture, with_offloaded_blocks
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe

Mixture = tuple[int, int]


def shrink_mixture(plan: Plan, *, original: RunSpec, small: RunSpec, vocab_size: int) -> tuple[Plan, list[str]]:
    """The plan for the small run, and the list of changes."""
    mixed, changes = _with_small_mixture(plan, original=original, small=small, vocab_size=vocab_size)
    number = mixed.activations.offload_blocks
    if number == 0:
        return mixed, changes
    blocks = num_blocks(small, vocab_size=vocab_size)
    kept = block_policies(mixed.activations.policy, mixed.activations.mixture, num_blocks=blocks).count("none")
    chosen = kept if number == "auto" else min(number, kept)
    changes += [f"activations.offload_blocks {number} -> {chosen}"] if chosen != number else []
    return with_offloaded_blocks(mixed, chosen), changes


def _with_small_mixture(plan: Plan, *, original: RunSpec, small: RunSpec, vocab_size: int) -> tuple[Plan, list[str]]:
    if plan.activations.policy != "budget":
        return plan, []
    blocks = num_blocks(small, vocab_size=vocab_size)
    given = plan.activations.mixture
    if given is None:
        chosen = mixture_of_all(blocks, may_select=not plan.compile.enabled)
        return with_mixture(plan, chosen), [f"activations.mixture: open, verified with every policy: {list(chosen)}"]
    original_blocks = num_blocks(original, vocab_size=vocab_size)
    require_mixture(plan, num_blocks=original_blocks)  # shrinking must not make a run legal
    chosen = in_proportion(given, original=original_blocks, small=blocks)
    changes = [f"activations.mixture {list(given)} -> {list(chosen)}"] if chosen != given else []
    return with_mixture(plan, chosen), changes


def mixture_of_all(blocks: int, *, may_select: bool) -> Mixture:
    """A third each of fully recomputed, selectively recomputed and saved blocks; halves without selective ones."""
    return (max(1, blocks // 3), blocks // 3) if may_select else (max(1, blocks // 2), 0)


def in_proportion(given: Mixture, *, original: int, small: int) -> Mixture:
    """Scale `given` from `original` to `small` blocks; each policy in use keeps a block while there are enough."""
    full, selective = given
    has_rest = full + selective < original

    def share(count: int, *, others: int) -> int:
        return max(0, min(max(1, round(count * small / original)), small - others)) if count else 0

    fewer_full = share(full, others=(selective > 0) + has_rest)
    if not has_rest:
        return (fewer_full, small - fewer_full) if selective else (small, 0)
    return fewer_full, share(selective, others=fewer_full + 1)


def num_blocks(run: RunSpec, *, vocab_size: int) -> int:
    """Blocks of the model, as the engine finds them."""
    return len(describe(build_skeleton(build_config(run.model, vocab_size=vocab_size))).blocks)
