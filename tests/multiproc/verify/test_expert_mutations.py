"""The mutation campaign of expert parallelism. CI runs a sample (`-m extended`), `-m slow` the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import by_default

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves a test's own folder out

import expert_mutations as bugs
import router_mutations as router_bugs
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
    "float8 wire": Group(
        plan=divided("tokens") | {"expert_parallel": {"dispatcher": "tokens", "wire": "float8"}},
        model="mixtral",
        bugs=(Bug(mutate=bugs.scales_off_by_one_power, check=("loss", "gradients"), step=1),),
    ),
    "router": Group(
        plan=divided("tokens") | {"activations": {"policy": "full"}},
        model="deepseek_v3",
        # so small a bias changes no choice: only the check of biases sees it
        router={"balance_loss": 0.1, "z_loss": 0.01, "bias_rate": 1e-6},
        bugs=(
            Bug(mutate=router_bugs.router_losses_averaged_over_ranks, check="gradients", step=1),
            Bug(mutate=router_bugs.shares_of_one_rank, check=("loss", "gradient norm", "expert load")),
            Bug(mutate=router_bugs.bias_moved_one_step_late, check="router bias", words=("by its loads",)),
            Bug(mutate=router_bugs.one_bias_moved_the_wrong_way, check="router bias", words=("expert",)),
            Bug(mutate=router_bugs.recomputed_choices_counted_again, check="expert load", step=1),
            Bug(mutate=router_bugs.expert_states_on_the_other_rank, check=("optimizer state", "loss", "weights")),
        ),
    ),
    "capacity": Group(
        plan=divided("tokens"),
        model="mixtral",
        router={"capacity_factor": 0.75, "balance_loss": 0.1},
        bugs=(
            Bug(mutate=router_bugs.drops_not_counted, check="dropped choices", step=1),
            Bug(mutate=router_bugs.capacity_of_a_micro_batch, check="loss", step=1),
            Bug(mutate=router_bugs.latest_tokens_kept, check="loss", step=1),
        ),
    ),
}


@pytest.mark.parametrize("name", by_default([], GROUPS, extended=["tokens", "router"]))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)


def test_the_names_of_bugs_are_unique() -> None:
    names = [bug.mutate.__name__ for group in GROUPS.values() for bug in group.bugs]
    assert len(names) == len(set(names)) >= 19
