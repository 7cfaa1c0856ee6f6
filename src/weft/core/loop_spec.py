"""Sections of run.toml about the loop around the steps: evaluation, checkpoints, logging, the ledger."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.core.config import Section

EVALUATION_STEPS = 50
HELD_OUT = "held-out"  # the name of the evaluation set that data.eval_fraction holds out


class LoopKeys(Section):
    """Keys of [train] about the loop around the steps."""

    stop_after_evaluations: int = Field(
        default=0,
        ge=0,
        description="evaluations without improvement after which the run ends, of the set of checkpoint.keep_best, "
        "else 'held-out'; 0 is off",
    )
    stop_delta: float = Field(
        default=0.0, ge=0, description="the least decrease of the loss that counts as an improvement, for that"
    )


class EvaluationSpec(Section):
    every: int | None = Field(
        default=None,
        ge=0,
        description="steps between evaluations; 0 is never; if given, too few held-out rows are an error; "
        "absent: 50, and too few rows are a warning",
    )
    batches: int = Field(default=4, ge=1, description="global batches of held-out rows per evaluation")
    weights: Literal["trained", "ema"] = Field(
        default="trained", description="the weights of held-out losses: trained | ema (train.ema_decay above 0)"
    )

    @property
    def interval(self) -> int:
        """Steps between evaluations, given or default; 0 is never."""
        return EVALUATION_STEPS if self.every is None else self.every


class CheckpointSpec(Section):
    every: int = Field(default=100, ge=0, description="steps between checkpoints; 0 is only at the end")
    keep: int = Field(default=2, ge=1, description="newest checkpoints kept, at least 1")
    keep_best: str | None = Field(
        default=None,
        description="an evaluation set, 'held-out' or a name of [[data.evaluation]]: each evaluation with its lowest "
        "loss so far is followed by a checkpoint, which is kept beside the newest until a lower one",
    )
    asynchronous: bool = Field(default=True, description="write in the background during training")
    at_end: bool = Field(default=True, description="save after the last step")
    memory_every: int = Field(
        default=0,
        ge=0,
        description="steps between copies of the state in host memory, from which `--max-restarts` continues; 0 is off",
    )


class LoggingSpec(Section):
    every: int = Field(default=10, ge=1, description="steps between plain log lines without a terminal")
    tensorboard: bool = Field(default=True, description="write TensorBoard files beside metrics.jsonl")


class LedgerSpec(Section):
    """Predicted, dry-run and measured costs side by side, in ledger.json and report.html."""

    measure: bool = Field(default=True, description="measure memory and traffic by term in the first steps")
    dry_run: bool = Field(
        default=True, description="`weft train` dry-runs rank 0 during the training, at the lowest priority"
    )
