"""Bugs that a plan and its reference share: each is caught by the check of the oracle that is about it.

One process and the oracle's checks alone; `-m slow` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import shared_mutations as bugs
from oracle_runs import failed_checks
from samples import by_default
from tiny_run import write_corpus

# bug -> the check that names it first, and the run that shows it
CAUGHT: dict[str, tuple[str, str]] = {
    "label_wraps_around": ("oracle data", "llama"),
    "cosine_never_decays": ("oracle schedule", "llama"),
    "initial_linears_doubled": ("oracle initial", "llama"),
    "order_repeats_rows": ("oracle data", "llama"),
    "export_with_another_epsilon": ("oracle export", "llama"),
    "first_label_carries_no_loss": ("oracle data", "llama"),
    "positions_run_through_documents": ("oracle data", "isolated"),
    "order_has_half_of_the_rows": ("oracle data", "llama"),
    "averages_are_not_evaluated": ("oracle loss", "schedule_free"),
    "averages_are_not_exported": ("oracle export", "schedule_free"),
    "mixture_ignores_its_weights": ("oracle data", "mixture"),
    "mixture_draws_one_source_after_the_other": ("oracle data", "mixture"),
    "mixture_repeats_rows": ("oracle data", "mixture"),
    "every_epoch_in_one_order": ("oracle data", "llama"),
    "rows_overlap": ("oracle data", "llama"),
    "tokenizer_drops_a_byte": ("oracle data", "llama"),
    "documents_run_together": ("oracle data", "one document"),
    "held_out_documents_are_trained_on": ("oracle data", "llama"),
    "loop_evaluates_on_training_rows": ("oracle loss", "llama"),
    "warmup_is_a_step_late": ("oracle schedule", "llama"),
    "cosine_ends_half_way": ("oracle schedule", "llama"),
    "final_rate_is_zero": ("oracle schedule", "llama"),
    "initial_embedding_a_fifth_too_small": ("oracle initial", "llama"),
    "norms_start_below_one": ("oracle initial", "llama"),
    "attention_sees_the_future": ("oracle loss", "llama"),
    "positions_off_by_one": ("oracle loss", "gpt2"),
    "tied_weights_untied": ("oracle initial", "qwen3-tied"),
    "config_with_another_epsilon": ("oracle config", "llama"),
    "labels_are_smoothed": ("oracle loss", "llama"),
    "bias_correction_missing": ("oracle update", "llama"),
    "epsilon_inside_the_root": ("oracle update", "llama"),
    "epsilon_of_another_optimizer": ("oracle update", "llama"),
    "betas_swapped": ("oracle update", "llama"),
    "vectors_decay_and_matrices_do_not": ("oracle update", "llama"),
    "decay_has_the_wrong_sign": ("oracle update", "sgd"),
    "momentum_looks_ahead": ("oracle update", "sgd"),
    "clipped_to_twice_the_norm": ("oracle update", "llama"),
    "export_turns_positions_faster": ("oracle export", "llama"),
    "export_generates_past_the_end": ("oracle export", "llama"),
}
BY_DEFAULT = ("label_wraps_around", "cosine_never_decays", "initial_linears_doubled", "order_repeats_rows",
              "mixture_ignores_its_weights", "averages_are_not_evaluated", "export_with_another_epsilon")  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", num_documents=12)


@pytest.mark.parametrize("name", by_default(BY_DEFAULT, CAUGHT))
def test_a_shared_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    check, run = CAUGHT[name]
    with getattr(bugs, name)():
        failed = failed_checks(corpus, tmp_path, run=run)
    assert failed, "survived"
    assert next(iter(failed)) == check, failed


@pytest.mark.parametrize(
    "run",
    by_default(
        ["llama"], ["llama", "isolated", "one document", "gpt2", "qwen3-tied", "sgd", "schedule_free", "mixture"]
    ),
)
def test_the_code_as_it_is_passes(run: str, corpus: Path, tmp_path: Path) -> None:
    assert not failed_checks(corpus, tmp_path, run=run)


def test_every_bug_is_listed() -> None:
    public = {
        name for name, value in vars(bugs).items() if getattr(value, "__annotations__", {}).get("return") == "Bug"
    }
    assert {name for name in public if not name.startswith("_")} == set(CAUGHT)
