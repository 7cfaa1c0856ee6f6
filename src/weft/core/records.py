"""Records of observations: a step, a parameter's sharding, a dtype. Plain frozen values, JSON in and out."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Kind = TypeVar("Kind")
OPERANDS = ("input", "weight", "gradient")  # of float8 products


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, equal on all ranks. A line of metrics.jsonl."""

    step: int  # 1 for the first
    loss: float  # mean over all tokens of the global batch; of pairs, over the pairs
    grad_norm: float  # before clipping, over the full model
    tokens: int  # tokens with a loss, over all ranks
    learning_rate: float
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    peak_memory_bytes: int = 0
    reserved_memory_bytes: int | None = None  # GPUs only: the allocator's peak, with memory that no tensor uses
    skipped: bool = False  # no update was made: scaled gradients of fp16 overflowed, or the step was bad
    bad_step: str | None = None  # why the step was bad, by train.on_bad_step
    loss_scale: float | None = None
    eval_loss: float | None = None  # of the held-out documents
    evaluations: dict[str, EvalRecord] | None = None  # of [[data.evaluation]], by name
    figures: dict[str, float] | None = None  # of the objective, such as the accuracy of pairs
    changed: tuple[str, ...] | None = None  # keys of run.toml that a resume changed before this step
    # Steps with a rank that the others wait for: its own seconds of work in a step, and the median of the others.
    slow_rank: int | None = None
    slow_rank_s: float | None = None
    other_ranks_s: float | None = None
    # Mixtures of experts only. Load: tokens of an expert over the mean of its layer; 1 is balanced.
    expert_load: float | None = None  # of the busiest expert, mean over the layers
    expert_load_max: float | None = None  # of the busiest expert of all layers
    expert_entropy: float | None = None  # of the shares, over its largest value, mean over the layers; 1 is balanced
    dead_experts: int | None = None  # experts without a token, over all layers
    dropped_share: float | None = None  # choices over the capacity of their expert, over all; mean over the layers
    router_balance_loss: float | None = None  # without its coefficient, mean over the layers; 1 is balanced
    router_z_loss: float | None = None  # without its coefficient, mean over the layers
    # Steps that float8.measure_every measures. The largest over all layers and operands:
    float8_error: float | None = None  # mean of |code - value| / |value|
    float8_overflow: float | None = None  # share of values larger than the largest code
    float8_underflow: float | None = None  # share of values that become 0
    float8_fallback: tuple[str, ...] | None = None  # layers that compute unquantised from the next step on
    float8_layers: dict[str, dict[str, list[float]]] | None = None  # by layer and OPERANDS: the three figures

    def as_dict(self) -> dict[str, Any]:
        found = {name: one.as_dict() for name, one in (self.evaluations or {}).items()}
        figures = {name: value if math.isfinite(value) else None for name, value in (self.figures or {}).items()}
        return {
            **record_fields(self),
            **({"evaluations": found} if found else {}),
            **({"figures": figures} if figures else {}),
        }

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> StepRecord:
        if fields.get("evaluations") is not None:
            found = fields["evaluations"].items()
            fields = {**fields, "evaluations": {name: EvalRecord.from_dict(one) for name, one in found}}
        for key in ("changed", "float8_fallback"):
            if fields.get(key) is not None:
                fields = {**fields, key: tuple(fields[key])}
        return parse_record(StepRecord, fields, numbers=("loss", "grad_norm"))


def record_fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON, without None; a number that is not finite is null."""
    present = {key: value for key, value in dataclasses.asdict(record).items() if value is not None}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in present.items()
    }


def parse_record(kind: type[Kind], fields: dict[str, Any], *, numbers: Sequence[str]) -> Kind:
    """The record of these fields, without unknown ones; `numbers`: fields that are NaN where they are null."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = {name: fields[name] for name in known if name in fields}
    nulls = {key: math.nan for key in numbers if values.get(key) is None}
    return kind(**{**values, **nulls})


def perplexity_of(loss: float) -> float:
    """exp(mean loss per token); infinite beyond the range of a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """A text that the model wrote after a step. A line of samples.jsonl."""

    step: int
    prompt: str
    text: str  # without the prompt
    tokens: int  # of the text, the last one of a text that ended included

    def as_dict(self) -> dict[str, Any]:
        return record_fields(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> TextSample:
        return parse_record(TextSample, fields, numbers=())


LOAD_UNIT = 16  # a mean load is stored as 16; a load of 15.9 or more as 255


@dataclass(frozen=True, kw_only=True)
class ExpertLoads:
    """The load of every expert in one step. A line of experts.jsonl."""

    step: int
    layers: tuple[str, ...]  # modules of experts
    experts: tuple[int, ...]  # of each layer
    loads: str  # one byte per expert, in base64: load over the layer's mean, in units of 1 / LOAD_UNIT
    dropped: tuple[int, ...] | None = None  # choices over capacity of each layer; None without router.capacity_factor

    @staticmethod
    def of(step: int, choices: Mapping[str, Sequence[float]], *, dropped: Sequence[int] | None = None) -> ExpertLoads:
        """`choices`: tokens of each expert, by layer; `dropped`: choices over capacity, by layer."""
        packed = bytearray()
        for counts in choices.values():
            mean = sum(counts) / len(counts) or 1.0
            packed += bytes(min(255, round(LOAD_UNIT * count / mean)) for count in counts)
        sizes = tuple(map(len, choices.values()))
        return ExpertLoads(
            step=step,
            layers=tuple(choices),
            experts=sizes,
            loads=base64.b64encode(packed).decode("ascii"),
            dropped=None if dropped is None else tuple(dropped),
        )

    def by_layer(self) -> dict[str, list[float]]:
        """Load over the mean, per expert."""
        flat = [byte / LOAD_UNIT for byte in base64.b64decode(self.loads)]
        ends = list(itertools.accumulate(self.experts))
        spans = zip(self.layers, self.experts, ends, strict=True)
        return {name: flat[end - size : end] for name, size, end in spans}

    def as_dict(self) -> dict[str, Any]:
        return record_fields(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> ExpertLoads:
        given = ("layers", "experts", *(["dropped"] if fields.get("dropped") is not None else []))
        sequences = {key: tuple(fields[key]) for key in given}
        return parse_record(ExpertLoads, {**fields, **sequences}, numbers=())


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """The loss of an evaluation: the sum of token losses over the number of tokens, over all ranks."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.loss)

    def as_dict(self) -> dict[str, Any]:
        values = {"loss": self.loss, "perplexity": self.perplexity}
        return {
            **{key: value if math.isfinite(value) else None for key, value in values.items()},
            "tokens": self.tokens,
        }

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> EvalRecord:
        return parse_record(EvalRecord, fields, numbers=("loss",))


@dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """One parameter of the model: its unit and the mesh axes that shard or replicate it. A row of the coverage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    unit: str  # its sharding unit: a block's name, or "(root)"
    sharded_axes: tuple[str, ...]
    replicated_axes: tuple[str, ...]
    local_elements: int  # on this rank
    tied_to: str | None = None
    trainable: bool = True
    reason: str = ""  # why tensor parallelism leaves it replicated


@dataclass(frozen=True, kw_only=True)
class BufferRecord:
    """One buffer of the model: a constant, or changed in forwards and synchronised as `state` describes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool  # part of checkpoints
    state: str


@dataclass(frozen=True, kw_only=True)
class DtypeRecord:
    """The requested dtype of a component and the dtypes found on its live tensors after the first step."""

    component: str
    asked: str
    found: tuple[str, ...]
    note: str = ""  # why another dtype is right nevertheless

    @property
    def ok(self) -> bool:
        return bool(self.note) or all(dtype == self.asked for dtype in self.found)


@dataclass(frozen=True, kw_only=True)
class HolderRecord:
    """A group of similar tensors that were live at the peak: their term, origin and total bytes."""

    term: str
    nbytes: int
    count: int
    module: str  # block numbers replaced: model.layers.*.mlp
    operator: str
    phase: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class PeakRecord:
    """One rank's memory at the peak of a step; the terms add up to it."""

    peak_bytes: int
    terms: dict[str, int]
    phase: str
    module: str
    operator: str
    largest: tuple[HolderRecord, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes,
            "terms": self.terms,
            "peak_at": {"phase": self.phase, "module": self.module, "operator": self.operator},
            "largest": [dataclasses.asdict(holder) for holder in self.largest],
        }


@dataclass(frozen=True, kw_only=True)
class TechniqueRecord:
    """One technique for speed or memory: whether it was on in this run, and why or why not."""

    technique: str
    on: bool
    why: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
