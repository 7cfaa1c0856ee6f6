"""Sections of run.toml about the loop around the steps: evaluation, checkpoints, logging, the ledger."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

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
    on_bad_step: Literal["stop", "skip", "rewind"] | None = Field(
        default=None,
        description="if the loss or the gradient norm of a step is not finite, or the loss is a spike: stop (save the "
        "state before the step, end the run) | skip (make no update, go on) | rewind (load the last checkpoint, go on "
        "with the batch after the bad one); decided before the update, for which the host waits in each step; absent: "
        "a loss or norm that is not finite ends the run after its update",
    )
    max_rewinds: int = Field(default=3, ge=1, description="rewinds of on_bad_step before the run ends, at least 1")
    spike_factor: float = Field(
        default=0.0,
        ge=0,
        description="with on_bad_step: a loss above this times the median of the last losses is bad too; 0 is off, "
        "else above 1",
    )
    spike_window: int = Field(
        default=64, ge=2, description="good steps whose losses that median is of; 8 at least count"
    )
    stop_delta: float = Field(
        default=0.0, ge=0, description="the least decrease of the loss that counts as an improvement, for that"
    )

    @model_validator(mode="after")
    def _spikes_are_acted_on(self) -> Self:
        if self.spike_factor and self.spike_factor <= 1:
            raise ValueError("spike_factor is 0, or above 1")
        if self.spike_factor and self.on_bad_step is None:
            raise ValueError("spike_factor needs on_bad_step: stop, skip or rewind")
        return self


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


class SamplesSpec(Section):
    """Texts that the model writes during the training."""

    every: int = Field(default=0, ge=0, description="steps between samples of text; 0 is never")
    prompts: list[str] = Field(
        default_factory=list,
        description="texts that the model continues; with data.format = chat: what a user says",
    )
    max_new_tokens: int = Field(default=64, ge=1, description="tokens per sample, at least 1")
    temperature: float = Field(
        default=0.0, ge=0, description="0: the likeliest token each time; 1: the model's own probabilities"
    )

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if self.every and not self.prompts:
            raise ValueError("every needs prompts, such as ['The']")
        if "" in self.prompts:
            raise ValueError("a prompt is empty")
        return self


class ProfileSpec(Section):
    """Steps that torch's profiler records, into the folder profile/ of the run."""

    first_step: int = Field(
        default=0, ge=0, description="the first step that is recorded; 0 is none. The first steps of a run are slower"
    )
    steps: int = Field(default=3, ge=1, description="steps that are recorded, at least 1")
    ranks: Literal["first", "all"] = Field(default="first", description="first (rank 0) | all (a trace per rank)")
    memory: bool = Field(default=True, description="record allocations too; on a GPU with a snapshot of the allocator")

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps - 1


class LoggingSpec(Section):
    every: int = Field(default=10, ge=1, description="steps between plain log lines without a terminal")
    tensorboard: bool = Field(default=True, description="write TensorBoard files beside metrics.jsonl")


class LedgerSpec(Section):
    """Predicted, dry-run and measured costs side by side, in ledger.json and report.html."""

    measure: bool = Field(default=True, description="measure memory and traffic by term in the first steps")
    dry_run: bool = Field(
        default=True, description="`weft train` dry-runs rank 0 during the training, at the lowest priority"
    )
