"""The mutation campaign of tensor parallelism. CI runs a sample (`-m extended`), `-m slow` the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import by_default

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves a test's own folder out

import tensor_mutations as bugs
from mutation_groups import Bug, Group, require_caught
from verify_ranks import Tables


def cut(*, stream: bool, loss: bool = True, microbatches: int = 2, **mesh: int) -> Tables:
    return {
        "mesh": mesh or {"tp": 2},
        "data_parallel": {"zero": 3 if "dp_shard" in mesh else 0},
        "tensor_parallel": {"sequence_parallel": stream, "loss_parallel": loss},
        "pipeline": {"microbatches": microbatches},
    }


GROUPS: dict[str, Group] = {
    "sample": Group(
        plan=cut(stream=True),
        bugs=(
            Bug(mutate=bugs.norms_not_summed_over_the_stream, check="gradients", words=("layernorm",), step=1),
            Bug(mutate=bugs.norm_counts_cut_parameters_once, check="gradient norm", step=1),
            Bug(mutate=bugs.loss_of_the_next_token, check="loss", step=1),
        ),
    ),
    "stream": Group(
        plan=cut(stream=True),
        bugs=(
            Bug(mutate=bugs.slice_of_another_rank, check="loss", step=1),
            Bug(mutate=bugs.input_sent_twice, check="collectives", words=("all_reduce",)),
            Bug(mutate=bugs.stream_begins_without_gather_in_backward, check="gradients", words=("embed",), step=1),
            Bug(mutate=bugs.stream_ends_with_a_sum_in_backward, check="gradients", step=1),
            Bug(mutate=bugs.table_of_the_next_rank, check="loss", step=1),
            Bug(mutate=bugs.loss_with_the_largest_of_own_logits, check="loss", step=1),
            Bug(mutate=bugs.norm_counts_whole_parameters_by_rank, check="gradient norm", step=1),
            Bug(mutate=bugs.loss_counted_by_every_rank, check="loss", step=1),
            Bug(mutate=bugs.evaluated_tokens_counted_by_every_rank, check="evaluation", step=1),
        ),
    ),
    "fused head and loss": Group(
        plan={**cut(stream=True), "kernels": {"loss": "fused"}},
        model="llama-odd",
        bugs=(
            Bug(mutate=bugs.fused_loss_with_the_largest_of_own_logits, check="loss", step=1),
            Bug(mutate=bugs.fused_head_input_not_summed, check="gradients", step=1),
            Bug(mutate=bugs.fused_gradient_of_the_own_softmax, check="gradients", step=1),
        ),
    ),
    "saved": Group(
        plan=cut(stream=True),
        bugs=(
            Bug(mutate=bugs.every_rank_saves_the_first_part, check="training loop", words=("off by",)),
            Bug(mutate=bugs.part_not_loaded, check="resume", step=3),
            Bug(mutate=bugs.parts_swapped_when_cut_again, check="resume back", words=("tp 2",), step=4),
        ),
    ),
    "whole": Group(
        plan=cut(stream=False, loss=False),
        model="qwen3-tied",
        bugs=(
            Bug(mutate=bugs.entry_without_sum_in_backward, check="gradients", step=1),
            Bug(mutate=bugs.exit_without_sum, check="loss", step=1),
            Bug(mutate=bugs.q_norm_not_summed, check="gradients", words=("q_norm",), step=1),
            Bug(mutate=bugs.foreign_tokens_not_zeroed, check="loss", step=1),
            Bug(mutate=bugs.head_input_not_summed, check="gradients", step=1),
            Bug(mutate=bugs.other_rows_on_the_second_rank, check=("loss", "gradients"), step=1),
        ),
    ),
    "dropout": Group(
        plan=cut(stream=False, microbatches=1),
        model="gpt2",
        bugs=(
            Bug(mutate=bugs.bias_added_by_every_rank, check="evaluation", step=1),
            Bug(mutate=bugs.masks_not_sliced, check=("loss", "gradients"), step=1),
            Bug(mutate=bugs.masks_of_the_first_slice, check=("loss", "gradients"), step=1),
        ),
    ),
    "fused": Group(
        plan=cut(stream=True, microbatches=1),
        model="phi3",
        bugs=(Bug(mutate=bugs.fused_projection_cut_as_one, check="loss", step=1),),
    ),
    "experts": Group(
        plan=cut(stream=False, microbatches=1),
        model="mixtral",
        bugs=(Bug(mutate=bugs.routing_weights_do_not_enter, check="gradients", step=1),),
    ),
    "wide norms": Group(
        plan=cut(stream=True, microbatches=1),
        model="olmo2",
        bugs=(Bug(mutate=bugs.statistics_of_own_features, check="loss", step=1),),
    ),
    "wide norms, repeated heads": Group(
        plan=cut(stream=True, microbatches=1, tp=4),
        model="olmo2",
        num_ranks=4,
        bugs=(Bug(mutate=bugs.statistics_count_every_copy, check="loss", step=1),),
    ),
    "a vocabulary that does not divide": Group(
        plan=cut(stream=False, loss=False, microbatches=1),
        model="llama-odd",
        bugs=(Bug(mutate=bugs.logits_not_trimmed, check="loss", step=1),),
    ),
    "repeated heads": Group(
        plan=cut(stream=True, microbatches=1, tp=4),
        num_ranks=4,
        bugs=(
            Bug(mutate=bugs.kv_heads_dealt_in_turns, check="loss", step=1),
            Bug(mutate=bugs.repeated_kv_heads_not_summed, check="gradients", words=("_proj",), step=1),
        ),
    ),
}


@pytest.mark.parametrize("name", by_default([], GROUPS, extended=["sample"]))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)


def test_the_campaign_is_large_and_names_are_unique() -> None:
    names = [bug.mutate.__name__ for group in GROUPS.values() for bug in group.bugs]
    assert len(names) == len(set(names)) >= 30
