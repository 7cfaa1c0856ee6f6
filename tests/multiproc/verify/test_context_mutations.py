"""The mutation campaign of context parallelism. CI runs a sample (`-m extended`), `-m slow` the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import by_default

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves a test's own folder out

import context_mutations as bugs
from mutation_groups import Bug, Group, require_caught

CP2 = {"mesh": {"cp": 2}}
PADDED = {"sequence_length": 15}  # does not divide over two ranks
PAIRS = {"mesh": {"cp": 4}, "context_parallel": {"attention": "ring", "ulysses": 2}}

GROUPS: dict[str, Group] = {
    "gather": Group(
        plan={**CP2, "data_parallel": {"zero": 3}},
        bugs=(
            Bug(mutate=bugs.positions_from_zero_in_the_second_piece, check="gradients", step=1),
            Bug(mutate=bugs.label_lost_at_a_border, check="loss", step=1),
            Bug(mutate=bugs.mask_off_by_one_at_an_edge, check="loss", step=1),
            Bug(mutate=bugs.gradients_of_keys_not_summed, check="gradients", step=1),
            Bug(mutate=bugs.keys_in_rank_order, check="loss", step=1),
            Bug(mutate=bugs.weight_counted_by_every_rank, check="evaluation"),
        ),
    ),
    "documents": Group(
        plan=CP2,
        data={"isolate_documents": True},
        bugs=(
            Bug(mutate=bugs.documents_lost, check="loss", step=1),
            Bug(mutate=bugs.seam_taken_for_a_border, check="loss", step=1),
        ),
    ),
    "windows": Group(plan=CP2, model="gemma2", bugs=(Bug(mutate=bugs.window_one_key_short, check="loss", step=1),)),
    "ring": Group(
        plan={**CP2, "context_parallel": {"attention": "ring"}},
        bugs=(
            Bug(mutate=bugs.gradients_of_passed_keys_dropped, check="gradients", step=1),
            Bug(mutate=bugs.ring_mask_off_by_one_at_an_edge, check="loss", step=1),
            Bug(mutate=bugs.positions_from_zero_in_the_second_piece, check="gradients", step=1),
            Bug(mutate=bugs.parts_averaged, check="loss", step=1),
        ),
    ),
    "pairs": Group(
        plan=PAIRS,
        num_ranks=4,
        bugs=(
            Bug(mutate=bugs.heads_exchanged_between_nodes, check="loss", step=1),
            Bug(mutate=bugs.neighbours_in_reverse, check="loss", step=1),
            Bug(mutate=bugs.keys_in_rank_order, check="loss", step=1),
            Bug(mutate=bugs.gradients_of_passed_keys_dropped, check="gradients", step=1),
        ),
    ),
    "pairs, sinks": Group(
        plan=PAIRS,
        model="gpt_oss",
        num_ranks=4,
        bugs=(Bug(mutate=bugs.every_rank_has_the_sinks_of_the_first_share, check=("loss", "gradients"), step=1),),
    ),
    "rotary": Group(
        plan={**CP2, "context_parallel": {"split": "contiguous"}},
        model="phi3-longrope",
        bugs=(Bug(mutate=bugs.rotary_of_the_rank_s_own_positions, check="gradients", step=1),),
    ),
    "ulysses": Group(
        plan={**CP2, "context_parallel": {"attention": "ulysses"}},
        bugs=(Bug(mutate=bugs.keys_in_rank_order, check="loss", step=1),),
    ),
    "dropout": Group(
        plan=CP2,
        model="gpt2",
        data=PADDED,
        bugs=(
            Bug(mutate=bugs.masks_by_local_position, check=("loss", "gradients"), step=1),
            Bug(mutate=bugs.masks_in_rank_order, check=("loss", "gradients"), step=1),
            Bug(mutate=bugs.masks_of_padded_rows, check=("loss", "gradients"), step=1),
        ),
    ),
    "dropout over heads": Group(
        plan={**CP2, "context_parallel": {"attention": "ulysses"}},
        model="gpt2",
        data=PADDED,
        bugs=(Bug(mutate=bugs.masks_of_the_first_heads, check=("loss", "gradients"), step=1),),
    ),
}


@pytest.mark.parametrize("name", by_default([], GROUPS, extended=["gather", "documents", "rotary"]))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)
