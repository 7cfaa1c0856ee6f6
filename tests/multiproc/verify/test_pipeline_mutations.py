"""The mutation campaign of pipelines. CI runs a sample (`-m extended`), `-m slow` the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import by_default

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves a test's own folder out

import pipeline_mutations as bugs
from mutation_groups import Bug, Group, require_caught
from verify_ranks import Tables


def cut(schedule: str = "1f1b", *, stages: int = 1, microbatches: int = 4) -> Tables:
    pipeline = {"schedule": schedule, "microbatches": microbatches, "virtual_stages": stages}
    return {"mesh": {"pp": 2}, "pipeline": pipeline}


GROUPS: dict[str, Group] = {
    "sample": Group(
        plan=cut(),
        model="qwen3-tied",
        bugs=(
            Bug(mutate=bugs.microbatches_swapped_at_one_stage, check="loss", step=1),
            Bug(mutate=bugs.tied_gradient_not_summed, check="gradients", words=("embed",), step=1),
        ),
    ),
    "one stage": Group(
        plan=cut(),
        model="qwen3-tied",
        bugs=(
            Bug(mutate=bugs.stale_activation, check="loss", step=1),
            Bug(mutate=bugs.loss_scaled_by_the_cuts, check="gradients", step=1),
            Bug(mutate=bugs.gradient_rows_reversed, check="gradients", step=1),
            Bug(mutate=bugs.tied_copy_counted_twice, check="gradient norm", step=1),
            Bug(mutate=bugs.norm_of_the_own_stage, check="gradient norm", step=1),
            Bug(mutate=bugs.entry_computes_once_more, check="loss", step=1),
            Bug(mutate=bugs.stages_agree_after_every_step, check="collectives", words=("all_reduce",)),
            Bug(mutate=bugs.tied_copy_not_loaded, check="resume", step=3),
        ),
    ),
    "split backward": Group(
        plan=cut("zero_bubble"),
        bugs=(Bug(mutate=bugs.weights_gradients_lost, check="gradients", step=1),),
    ),
    "split backward, fused loss": Group(
        plan={**cut("zero_bubble"), "kernels": {"loss": "fused"}},
        bugs=(Bug(mutate=bugs.head_left_to_the_second_half, check="gradients", words=("lm_head",), step=1),),
    ),
    "stashed": Group(
        plan=cut("pipedream"),
        bugs=(
            Bug(mutate=bugs.stash_off_by_one_version, check="loss", step=1),
            Bug(mutate=bugs.stash_overwritten, check="loss", step=1),
        ),
    ),
    "two buffers": Group(
        plan=cut("pipedream_2bw"),
        model="qwen3-tied",
        bugs=(
            Bug(mutate=bugs.stash_off_by_one_version, check="loss", step=3),
            Bug(mutate=bugs.stash_overwritten, check="loss", step=2),
            Bug(mutate=bugs.update_at_the_rate_of_the_step_after, check="loss", step=4),
            Bug(mutate=bugs.gradients_of_two_steps_in_one, check="gradient norm", step=3),
            Bug(mutate=bugs.tied_gradient_not_summed, check="gradients", words=("embed",), step=1),
        ),
    ),
    "low precision": Group(
        plan={**cut(), "precision": {"preset": "bf16"}},
        model="qwen3-tied",
        bugs=(Bug(mutate=bugs.tied_gradient_not_summed, check="gradients", words=("embed",), step=1),),
    ),
    "dropout": Group(
        plan=cut(),
        model="gpt2",
        bugs=(Bug(mutate=bugs.dropout_numbered_through, check="loss", step=1),),
    ),
}


@pytest.mark.parametrize("name", by_default([], GROUPS, extended=["sample", "stashed", "split backward"]))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)
