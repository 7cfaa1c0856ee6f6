"""Whether the MLPs of a run's model can run in chunks of positions, asked of the model before ranks start."""

from __future__ import annotations

from weft.core.run_spec import RunSpec
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.models.mlps import find_mlps, refusal
from weft.plan.per_run import kept_per_run

_FEW_TOKENS = 64  # of a model that takes its tokenizer's vocabulary


@kept_per_run
def check_chunked_mlps(run: RunSpec) -> list[tuple[str, str]]:
    """Reasons against `activations.sequence_chunk`, as (sentence, hint)."""
    model = build_skeleton(build_config(run.model, vocab_size=_FEW_TOKENS), attention=run.model.attention)
    refused = refusal(model, find_mlps(model, describe(model)))
    return [refused] if refused else []
