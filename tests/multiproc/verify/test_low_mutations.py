"""Bugs of bfloat16 states and weights are caught by the check that is about them; healthy plans pass every check."""

from __future__ import annotations

from pathlib import Path

import low_mutations as bugs
import pytest
from mutation_groups import Bug, Group, require_caught

CHECK = "rounded updates"
MOMENTS = {"preset": "bf16", "optimizer_state": "bfloat16"}
MASTER_FREE = {**MOMENTS, "master_weights": "bfloat16"}
SHARDED = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}}
REPLICATED = {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}}

GROUPS: dict[str, Group] = {
    "moments": Group(
        plan={**SHARDED, "precision": MOMENTS},
        bugs=(
            Bug(mutate=bugs.second_moment_rounded_to_nearest, check=CHECK, words=("exp_avg_sq", "differently"), step=1),
            Bug(mutate=bugs.bias_correction_forgotten, check=CHECK, words=("weight", "element"), step=1),
            Bug(mutate=bugs.root_not_corrected, check=CHECK, words=("weight", "element"), step=1),
            Bug(mutate=bugs.clipped_twice, check=CHECK, words=("exp_avg", "element"), step=1),
            Bug(mutate=bugs.factor_kept_for_the_next_step, check=CHECK, words=("exp_avg", "element"), step=2),
            Bug(mutate=bugs.bits_by_local_element, check=CHECK, words=("exp_avg_sq", "differently"), step=1),
            Bug(mutate=bugs.the_same_bits_every_step, check=CHECK, words=("exp_avg_sq", "differently"), step=2),
            Bug(mutate=bugs.one_key_for_all_parameters, check=CHECK, words=("exp_avg_sq", "differently"), step=1),
            Bug(mutate=bugs.moments_read_after_rounding, check=CHECK, words=("weight", "element"), step=1),
        ),
    ),
    "weights": Group(
        plan={**REPLICATED, "precision": MASTER_FREE},
        bugs=(
            Bug(mutate=bugs.weight_rounded_to_nearest, check=CHECK, words=("weight", "differently"), step=1),
            Bug(mutate=bugs.weight_cut_off, check=CHECK, words=("weight", "differently"), step=1),
            Bug(mutate=bugs.the_same_bits_every_step, check=CHECK, words=("differently",), step=2),
            Bug(mutate=bugs.clipped_twice, check=CHECK, words=("exp_avg", "element"), step=1),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GROUPS))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)
