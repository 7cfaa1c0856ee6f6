"""The mutation campaign of expert parallelism. CI runs a sample (`-m extended`), `-m slow` the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import by_default

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves a test's own folder out

import expert_mutations as bugs
from mutation_groups import Bug, Group, require_caught
from verify_ranks import Tables


def divided(dispatcher: str, zero: int = 3, microbatches: int = 2) -> Tables:
    return {
        "mesh": {"dp_shard": 2, "ep": 2},
        "data_parallel": {"zero": zero},
        "expert_parallel": {"dispatcher": dispatcher},
        "pipeline": {"microbatches": microbatches},
    }


GROUPS: dict[str, Group] = {
    "tokens": Group(
        plan=divided("tokens"),
        model="mixtral",
        bugs=(
            Bug(mutate=bugs.expert_gradients_scaled_by_ep, check="gradients", words=("experts",), step=1),
            Bug(mutate=bugs.weights_applied_twice, check="loss", step=1),
            Bug(mutate=bugs.router_without_gradient, check=("gradients", "collectives"), step=1),
            Bug(mutate=bugs.owner_off_by_one, check="loss", step=1),
            Bug(mutate=bugs.order_not_restored, check="loss", step=1),
            Bug(mutate=bugs.norm_without_experts_of_other_ranks, check="gradient norm", step=1),
        ),
    ),
    "pairs": Group(
        plan=divided("pairs", zero=1, microbatches=1),
        model="mixtral",
        bugs=(
            Bug(mutate=bugs.counts_of_experts_swapped, check=("loss", "gradients"), step=1),
            Bug(mutate=bugs.local_number_off_by_one, check="loss", step=1),
            Bug(mutate=bugs.expert_gradients_averaged_over_ep, check="gradients", words=("experts",), step=1),
        ),
    ),
}


@pytest.mark.parametrize("name", by_default([], GROUPS, extended=["tokens"]))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)


def test_the_names_of_bugs_are_unique() -> None:
    names = [bug.mutate.__name__ for group in GROUPS.values() for bug in group.bugs]
    assert len(names) == len(set(names)) >= 9
