"""`RunSpec`: model, data and optimization of a run. A frozen value whose printed form (run.toml) parses back.

Devices are in plan: the same run.toml gives the same curve at any layout.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from weft.core.adapter_spec import AdapterSpec
from weft.core.config import Document, Section, sections_of
from weft.core.data_spec import DataSpec
from weft.core.loop_spec import (
    HELD_OUT,
    CheckpointSpec,
    EvaluationSpec,
    LedgerSpec,
    LoggingSpec,
    LoopKeys,
    ProfileSpec,
    SamplesSpec,
)
from weft.core.muon import Precision, Scale
from weft.core.objective_spec import ObjectiveSpec
from weft.core.optimizers import NAMES, OPTIMIZERS, OptimizerKind
from weft.core.parameter_groups import GroupSpec
from weft.core.track_spec import TrackSpec
from weft.core.vocabulary import BYTES


class ModelSpec(Section):
    """A Hugging Face causal LM: `type` + `config` with random weights, or `path`, a folder with config.json."""

    type: str | None = Field(default=None, description="an HF model type such as 'llama', 'gpt2', 'qwen3'")
    path: str | None = Field(default=None, description="a folder with config.json and *.safetensors, or a hub name")
    revision: str | None = Field(
        default=None, description="branch, tag or commit of a hub name; a run records the commit that it used"
    )
    config: dict[str, Any] = Field(default_factory=dict, description="overrides of the HF config")
    weights: Literal["auto", "random", "pretrained"] = Field(
        default="auto", description="auto (pretrained with path, random with type) | random | pretrained"
    )
    attention: Literal["sdpa", "eager"] = Field(default="sdpa", description="sdpa | eager")
    head: Literal["tokens", "scalar"] = Field(
        default="tokens",
        description="tokens | scalar (one number per position in place of logits; objective.kind = 'reward' sets it)",
    )

    @property
    def own_tokenizer(self) -> str | None:
        """The name of the tokenizer that comes with `path`: NAME, or NAME@REVISION."""
        return self.path if self.path is None or self.revision is None else f"{self.path}@{self.revision}"

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.type is None) == (self.path is None):
            raise ValueError("give exactly one of type and path")
        if self.weights == "pretrained" and self.path is None:
            raise ValueError("weights = 'pretrained' needs path, a folder with *.safetensors")
        if self.revision is not None and self.path is None:
            raise ValueError("revision needs path, a hub name")
        return self


class OptimizationKeys(Section):
    """Keys of [train] about the optimization."""

    steps: int = Field(default=200, ge=1, description="optimizer steps, at least 1")
    global_batch: int = Field(
        default=32, ge=1, description="sequences per step over all ranks (of pairs: pairs), at least 1"
    )
    learning_rate: float = Field(default=3e-4, gt=0, description="the peak learning rate, above 0")
    optimizer: OptimizerKind = Field(default="adamw", description=NAMES)
    optimizer_kernel: Literal["auto", "fused", "foreach"] = Field(
        default="auto",
        description="how the update runs: auto (adam and adamw fused, sgd one parameter at a time) | fused | "
        "foreach (needs 4 more bytes per parameter)",
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95),
        description="decay rates of the moments (all but sgd); lion is usually run with (0.9, 0.99)",
    )
    epsilon: float = Field(
        default=1e-8, gt=0, description="added to the denominator (adam, adamw, adamw8bit, muon), above 0"
    )
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="momentum of muon, 0 up to below 1")
    muon_scale: Scale = Field(
        default="match_rms_adamw",
        description="the rate of a matrix over learning_rate: match_rms_adamw (0.2 sqrt(max(rows, columns)): that of "
        "adamw fits) | original (sqrt(max(1, rows / columns)): usually with 0.02 and groups for all other parameters)",
    )
    muon_precision: Precision = Field(
        default="auto",
        description="dtype of muon's Newton-Schulz steps and of matrices on their way to their owners: auto (bfloat16 "
        "on GPUs, float32 on CPUs) | bfloat16 | float32",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of sgd, 0 up to below 1")
    weight_decay: float = Field(
        default=0.1, ge=0, description="decay of matrices; vectors (norms, biases) decay only if a group says so"
    )
    groups: list[GroupSpec] = Field(
        default_factory=list,
        description="tables [[train.groups]]: pattern, then learning_rate or learning_rate_ratio, weight_decay",
    )
    ema_decay: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="decay of an exponential moving average of the weights, kept beside them in float32; 0 is off, "
        "0.999 is usual",
    )
    clip_norm: float = Field(default=1.0, ge=0, description="the gradient norm is clipped to this; 0 is off")
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = Field(
        default="cosine", description="cosine | linear | constant | wsd (warm-up, stable, decay) | inverse_sqrt"
    )
    warmup_steps: int = Field(default=10, ge=0, description="steps in which the learning rate rises to its peak")
    final_learning_rate_ratio: float = Field(
        default=0.1, ge=0, le=1, description="the last learning rate over the peak (cosine, linear, wsd), 0 to 1"
    )
    decay_share: float = Field(
        default=0.2, ge=0, le=1, description="share of the steps, at the end, in which wsd falls in a straight line"
    )
    seed: int = Field(
        default=0, ge=0, description="seed of initial weights, data order, dropout and stochastic rounding"
    )
    frozen: list[str] = Field(default_factory=list, description="glob patterns of parameter names that never change")
    collective_timeout_s: float = Field(default=300.0, gt=0, description="seconds before a silent peer is an error")
    hang_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="seconds within which a rank that others wait for inside a step, without any progress, is named "
        "and the run ended; not in the first step, saves and loads",
    )

    @model_validator(mode="after")
    def _kernel_exists(self) -> Self:
        if self.optimizer_kernel != "auto" and not OPTIMIZERS[self.optimizer].has_kernels:
            raise ValueError(f"optimizer_kernel is for adamw, adam and sgd; {self.optimizer} has its own kernel")
        return self


class TrainSpec(LoopKeys, OptimizationKeys):
    """The optimization, and the loop around its steps."""


class RouterSpec(Section):
    """Balancing of a mixture of experts. Means are over all tokens of the global batch that a router saw."""

    balance_loss: float = Field(
        default=0.0, ge=0, description="coefficient of the balancing loss of each layer; 0 is off, 0.01 is usual"
    )
    balance_over: Literal["batch", "micro_batch", "transformers"] = Field(
        default="batch",
        description="shares of experts in the balancing loss: batch (of the previous step's global batch: the same in "
        "every layout) | micro_batch (of each rank's micro-batch, as Megatron does it: depends on the layout) | "
        "transformers (of each rank's micro-batch and all layers at once: its own loss with output_router_logits, "
        "whose router_aux_loss_coef is balance_loss; depends on the layout)",
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="coefficient of the squared log-sum-exp of router logits; 0 is off"
    )
    capacity_factor: float = Field(
        default=0.0,
        ge=0,
        description="in training an expert computes the earliest ceil(capacity_factor x tokens x experts per token / "
        "experts) tokens of a sequence and drops the others; 0 is off",
    )
    bias_rate: float = Field(
        default=0.0,
        ge=0,
        description="step of the bias that corrects the choice of experts (DeepSeek-V3), for models that have one; "
        "0 is off, 0.001 is usual",
    )

    @property
    def has_losses(self) -> bool:
        return self.balance_loss > 0 or self.z_loss > 0

    @property
    def reads_routers(self) -> bool:
        """Whether the logits or biases of routers are needed."""
        return self.has_losses or self.bias_rate > 0

    @property
    def is_active(self) -> bool:
        return self.reads_routers or self.capacity_factor > 0


class RunSpec(Document):
    """The complete run."""

    model: ModelSpec
    adapter: AdapterSpec = AdapterSpec()
    data: DataSpec = DataSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    train: TrainSpec = TrainSpec()
    router: RouterSpec = RouterSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    samples: SamplesSpec = SamplesSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    logging: LoggingSpec = LoggingSpec()
    track: TrackSpec = TrackSpec()
    ledger: LedgerSpec = LedgerSpec()
    profile: ProfileSpec = ProfileSpec()

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name: the given one, else the model's own, else bytes."""
        return self.data.tokenizer or self.model.own_tokenizer or BYTES

    @property
    def watched_set(self) -> str:
        """The evaluation set that decides which checkpoint is the best and when the run ends; empty: none does."""
        return self.checkpoint.keep_best or (HELD_OUT if self.train.stop_after_evaluations else "")

    @model_validator(mode="after")
    def _watches_a_set(self) -> RunSpec:
        names = [one.name for one in self.data.evaluation] + ([HELD_OUT] if self.data.eval_fraction else [])
        if self.watched_set and self.watched_set not in names:
            given = "checkpoint.keep_best" if self.checkpoint.keep_best else "train.stop_after_evaluations"
            known = ", ".join(map(repr, names)) or "none"
            raise ValueError(f"{given} needs the evaluation set {self.watched_set!r}; the sets of this run: {known}")
        if self.watched_set and self.evaluation.interval == 0:
            raise ValueError("checkpoint.keep_best and train.stop_after_evaluations need evaluation.every above 0")
        return self

    @model_validator(mode="after")
    def _has_average(self) -> RunSpec:
        if self.evaluation.weights == "ema" and not self.train.ema_decay:
            raise ValueError("evaluation.weights = 'ema' needs train.ema_decay above 0, such as 0.999")
        return self

    @model_validator(mode="after")
    def _is_schedule_free(self) -> RunSpec:
        if self.train.optimizer == "schedule_free":
            if self.train.schedule != "constant":
                raise ValueError(
                    "train.optimizer = 'schedule_free' needs train.schedule = 'constant', after any warm-up"
                )
            if self.train.ema_decay:
                raise ValueError("train.optimizer = 'schedule_free' averages the weights itself: leave out ema_decay")
        return self

    @model_validator(mode="after")
    def _has_head(self) -> RunSpec:
        """Store the head in the value: whoever builds the model reads [model] alone."""
        if self.objective.kind == "reward":
            object.__setattr__(self, "model", self.model.model_copy(update={"head": "scalar"}))
        elif self.model.head == "scalar":
            raise ValueError("model.head = 'scalar' needs objective.kind = 'reward'")
        return self

    @model_validator(mode="after")
    def _name_tokenizer(self) -> RunSpec:
        """Store the choice in the value, so that run.toml of a run folder has it and a resumed run keeps it."""
        if self.data.tokenizer is None:
            object.__setattr__(self, "data", self.data.model_copy(update={"tokenizer": self.tokenizer}))
        return self

    @staticmethod
    def default() -> RunSpec:
        return RunSpec.from_tables(DEFAULT_RUN, source="the embedded default")


# The default run on a laptop: real text, nothing to download, about two minutes on two cores.
DEFAULT_RUN: dict[str, Any] = {
    "model": {
        "type": "llama",
        "config": {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    },
    "data": {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": 256},
    "train": {"steps": 200, "global_batch": 8, "learning_rate": 1e-3, "optimizer": "adamw", "seed": 0},
}

SECTIONS = sections_of(RunSpec)
