"""The mutation campaign of borders and partial batches. CI runs a sample (`-m extended`), `-m slow` the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import by_default

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves a test's own folder out

import border_mutations as bugs
from mutation_groups import Bug, Group, require_caught
from verify_ranks import Tables

DDP = {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}}
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def cut(*, stream: bool = True, loss: bool = True, fused: bool = False, microbatches: int = 2) -> Tables:
    return {
        "mesh": {"tp": 2},
        "tensor_parallel": {"sequence_parallel": stream, "loss_parallel": loss},
        "pipeline": {"microbatches": microbatches},
        "kernels": {"loss": "fused" if fused else "whole"},
    }


LABELS = (
    Bug(mutate=bugs.label_of_the_first_token_missing, check="loss", step=1),
    Bug(mutate=bugs.label_of_the_last_token_missing, check="loss", step=1),
    Bug(mutate=bugs.label_before_the_slice_counted_twice, check="loss", step=1),
    Bug(mutate=bugs.label_after_the_slice_counted_twice, check="loss", step=1),
    Bug(mutate=bugs.labels_of_the_last_rank_one_off, check="loss", step=1),
    Bug(mutate=bugs.slice_of_the_last_rank_one_short, check="loss", step=1),
)
LOOP = ("loop evaluation", "oracle loss", "oracle data")  # the oracle looks at the same evaluations first
GROUPS: dict[str, Group] = {
    "vocabulary": Group(
        plan=cut(),
        bugs=(
            Bug(mutate=bugs.first_row_of_the_table_missing, check="loss", step=1),
            Bug(mutate=bugs.last_row_of_the_table_missing, check="loss", step=1),
            Bug(mutate=bugs.row_before_the_table_found_twice, check="loss", step=1),
            Bug(mutate=bugs.row_after_the_table_found_twice, check="loss", step=1),
            *LABELS,
        ),
    ),
    "vocabulary of unequal slices, fused": Group(plan=cut(fused=True), model="llama-odd", bugs=LABELS),
    "vocabulary on a grid": Group(
        plan={"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d", "sequence_parallel": False}},
        num_ranks=4,
        bugs=(
            Bug(mutate=bugs.first_row_of_the_grid_table_missing, check="loss", step=1),
            Bug(mutate=bugs.last_row_of_the_grid_table_missing, check="loss", step=1),
            Bug(mutate=bugs.label_of_the_first_token_missing, check="loss", step=1),
            Bug(mutate=bugs.label_after_the_slice_counted_twice, check="loss", step=1),
        ),
    ),
    "padding": Group(
        plan=cut(stream=False, microbatches=1),
        model="phi3",
        bugs=(Bug(mutate=bugs.padding_row_trained, check="gradients", words=("embed_tokens",), step=1),),
    ),
    "partial batches": Group(
        plan=DDP,
        bugs=(
            Bug(mutate=bugs.tail_batch_evaluated_twice, check=LOOP),
            Bug(mutate=bugs.tail_batch_not_evaluated, check=LOOP),
            Bug(mutate=bugs.training_rows_evaluated, check=LOOP),
            Bug(mutate=bugs.fillers_of_the_tail_evaluated, check=LOOP),
            Bug(mutate=bugs.batch_means_averaged, check="evaluation", step=1),
            Bug(mutate=bugs.empty_microbatch_counts_as_one_token, check="loss", step=2),
            Bug(mutate=bugs.row_at_the_microbatch_border_taken_twice, check="loss", step=1),
            Bug(mutate=bugs.masked_label_of_the_last_position_counts, check="loss", step=1),
        ),
    ),
    "rates and checkpoints": Group(
        plan=DDP,
        bugs=(
            Bug(mutate=bugs.rate_of_the_matrices_alone, check="first update", words=("norm",), step=1),
            Bug(mutate=bugs.second_checkpoint_of_the_first_values, check="resume", step=3),
        ),
    ),
    "below the clip norm": Group(
        plan=DDP,
        train={"optimizer": "sgd", "learning_rate": 0.1},
        bugs=(Bug(mutate=bugs.small_gradients_scaled_up, check="finite data", step=2),),
    ),
    "documents": Group(
        plan=DDP,
        data={"isolate_documents": True},
        bugs=(
            Bug(mutate=bugs.documents_not_kept_apart, check="loss", step=1),
            Bug(mutate=bugs.label_behind_the_last_column_counts, check="loss", step=1),
        ),
    ),
    "chunks": Group(
        plan={**DDP, "kernels": {"loss": "fused"}},
        bugs=(
            Bug(mutate=bugs.last_row_of_a_stretch_missing, check="accumulation", words=("chunks",)),
            Bug(mutate=bugs.head_gradient_of_the_last_stretch_alone, check="accumulation", words=("chunks",)),
        ),
    ),
    "8-bit": Group(
        plan={"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}},
        model="llama-wide",
        train={"optimizer": "adamw8bit"},
        bugs=(Bug(mutate=bugs.second_moment_with_a_sign, check=("same precision", "optimizer state")),),
    ),
    "two stages a rank": Group(
        plan={
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "interleaved_1f1b", "microbatches": 4, "virtual_stages": 2},
        },
        model="llama-deep",
        bugs=(Bug(mutate=bugs.gradient_lost_between_stages_of_one_rank, check="gradients", step=1),),
    ),
    "replicas of a pipeline": Group(
        plan={"mesh": {"pp": 2, "dp_replicate": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 2}},
        num_ranks=4,
        bugs=(Bug(mutate=bugs.vectors_of_replicas_not_summed, check="gradients", words=("norm",), step=1),),
    ),
}


@pytest.mark.parametrize("name", by_default([], GROUPS, extended=["rates and checkpoints"]))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)
