"""The mutation campaign: realistic bugs, one at a time, and each is caught by the check that is about it.

`-m slow` runs the groups that take longest: resumed runs, hybrid shards, recompute.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import by_default

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves a test's own folder out

import mutations as bugs
from mutation_groups import Bug, Group, require_caught
from verify_ranks import Tables


def zero(stage: int, *, microbatches: int = 2, preset: str = "fp32", **mesh: int) -> Tables:
    return {
        "mesh": mesh or {"dp_shard": 2},
        "data_parallel": {"zero": stage},
        "pipeline": {"microbatches": microbatches},
        "precision": {"preset": preset},
    }


DDP = {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}}
EMBEDDING, NORM = bugs.EMBEDDING, bugs.NORM

GROUPS: dict[str, Group] = {
    "sharded": Group(
        plan=zero(3),
        bugs=(
            Bug(mutate=bugs.loss_divided_twice, check="loss", step=1),
            Bug(mutate=bugs.mean_of_means_over_ranks, check="loss", step=1),
            Bug(mutate=bugs.token_count_of_one_rank, check="loss", step=1),
            Bug(mutate=bugs.labels_shifted_twice, check="loss", step=1),
            Bug(mutate=bugs.padding_counted_as_tokens, check="loss", step=1),
            Bug(mutate=bugs.last_microbatch_without_gradient, check="gradients", words=("rank",), step=1),
            Bug(mutate=bugs.gradients_sent_in_bfloat16, check="dtypes", words=("reduce", "bfloat16"), step=1),
            Bug(mutate=bugs.norm_of_one_shard, check="gradient norm", step=1),
            Bug(mutate=bugs.clipped_by_own_norm, check="first update", step=1),
            Bug(mutate=bugs.not_clipped, check="first update", step=1),
            Bug(mutate=bugs.vectors_decay_too, check="first update", words=("norm",), step=1),
            Bug(mutate=bugs.zero3_runs_as_zero1, check="collectives", words=("all_gather",)),
            Bug(mutate=bugs.weights_drawn_by_rank, check="initial weights", words=("rank 1",)),
            Bug(mutate=bugs.one_rank_shifted_by_a_row, check="data order", words=("rank 1 (dp_shard 1)",), step=1),
            Bug(mutate=bugs.order_seeded_by_rank, check="data order", words=("row 4", "rank 1"), step=1),
            Bug(mutate=bugs.noise_in_the_forward, check="determinism"),
            Bug(mutate=bugs.evaluation_averaged_over_ranks, check="evaluation"),
        ),
    ),
    "resumed": Group(
        plan=zero(3),
        bugs=(
            Bug(mutate=bugs.shards_swapped_at_resume, check="resume", step=4),
            Bug(mutate=bugs.states_swapped_when_resharded, check="resume elsewhere", words=("DDP",), step=4),
            Bug(mutate=bugs.step_count_reset_at_resume, check="resume", step=4),
            Bug(mutate=bugs.one_tensor_not_loaded, check="resume", step=3),
            Bug(mutate=bugs.data_counter_off_by_one, check="resume", step=3),
            Bug(mutate=bugs.rate_one_step_late_after_resume, check="resume", step=4),
            Bug(mutate=bugs.weights_saved_before_the_step, check="training loop", words=("off by",)),
            Bug(mutate=bugs.loop_repeats_the_first_batch, check="training loop", step=2),
            Bug(mutate=bugs.export_rounds_to_bfloat16, check="export"),
            Bug(mutate=bugs.export_drops_a_weight, check="export", words=(NORM,)),
            Bug(mutate=bugs.fillers_carry_weight, check="oracle data", words=("pad a last batch",)),
        ),
    ),
    "replicated, tied, partly frozen": Group(
        plan=DDP,
        model="qwen3-tied",
        train={"frozen": [NORM]},
        bugs=(
            Bug(mutate=bugs.tied_weight_not_reduced, check="gradients", words=(EMBEDDING,), step=1),
            Bug(mutate=bugs.sum_reduced_as_mean, check="gradients", step=1),
            Bug(mutate=bugs.replicated_norm_summed, check="gradient norm", step=1),
            Bug(mutate=bugs.frozen_parameter_decays, check="first update", words=(NORM,), step=1),
            Bug(mutate=bugs.frozen_parameter_trained, check="gradients", words=(NORM, "none"), step=1),
            Bug(
                mutate=bugs.last_update_lost_on_one_replica,
                check="replicas",
                words=("input_layernorm", "rank 1 (dp_replicate 1)"),
            ),
        ),
    ),
    "dropout, ZeRO-2": Group(
        plan=zero(2, microbatches=1),
        model="gpt2",
        bugs=(
            Bug(mutate=bugs.dropout_seeded_by_rank, check="loss", step=1),
            Bug(mutate=bugs.dropout_the_same_in_every_row_block, check="loss", step=1),
            Bug(mutate=bugs.evaluation_in_train_mode, check="evaluation", step=1),
            Bug(mutate=bugs.eval_mode_left_on, check="loss", step=2),
            Bug(mutate=bugs.loss_divided_by_the_cut, check="accumulation", words=("2 micro-batches",)),
            Bug(mutate=bugs.weights_gathered_before_the_update, check="first update", step=1),
            Bug(mutate=bugs.weights_stay_gathered_after_evaluation, check="optimizer state"),
        ),
    ),
    "dropout, recomputed": Group(
        plan={**zero(3), "activations": {"policy": "full"}},
        model="gpt2",
        bugs=(
            Bug(mutate=bugs.masks_drawn_anew_when_recomputed, check="gradients", step=1),
            Bug(mutate=bugs.masks_of_the_first_rows_when_recomputed, check="gradients", step=1),
        ),
    ),
    "bf16, recomputed": Group(
        plan={**DDP, "precision": {"preset": "bf16"}, "activations": {"policy": "selective"}},
        bugs=(Bug(mutate=bugs.weights_of_the_first_step_when_recomputed, check="forward weights", step=2),),
    ),
    "bf16": Group(
        plan=zero(3, preset="bf16"),
        bugs=(
            Bug(mutate=bugs.computes_in_float32, check="dtypes", words=("weights", "bfloat16", "float32")),
            Bug(mutate=bugs.gradients_kept_in_bfloat16, check="same precision", words=("gradients",), step=1),
        ),
    ),
    "fused loss": Group(
        plan={**zero(3), "kernels": {"loss": "fused"}},
        model="gemma2",
        bugs=(
            Bug(mutate=bugs.capped_logits_without_their_slope, check="gradients", step=1),
            Bug(mutate=bugs.fused_loss_of_labels_that_do_not_count, check="loss", step=1),
        ),
    ),
    "float8": Group(
        plan={**zero(2, preset="bf16"), "float8": {"linears": "all"}},
        model="llama-wide",
        bugs=(Bug(mutate=bugs.gradients_on_the_scale_of_the_forward, check="gradients", step=1),),
    ),
    "fp16": Group(
        plan=zero(1, preset="fp16"),
        train={"optimizer": "sgd"},
        bugs=(Bug(mutate=bugs.loss_scale_left_in, check="first update", step=1),),
    ),
    "hybrid": Group(
        plan=zero(3, microbatches=1, dp_replicate=2, dp_shard=2),
        num_ranks=4,
        bugs=(Bug(mutate=bugs.replicas_not_reduced, check="gradients", words=("none",), step=1),),
    ),
}


@pytest.mark.parametrize(
    "name", by_default([], GROUPS, extended=["sharded", "bf16", "replicated, tied, partly frozen"])
)
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)


def test_the_campaign_is_large_and_names_are_unique() -> None:
    names = [bug.mutate.__name__ for group in GROUPS.values() for bug in group.bugs]
    assert len(names) == len(set(names)) >= 40
