"""`ServerRun`: a run on parameter servers - model, data, tables, modes. A frozen value; its printed form parses back.

The counterpart of `RunSpec` and `Plan`: one document, because the number of workers and the mode change the training.
A document with a [server] table is a ServerRun.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from weft.core.config import Document, Section, sections_of
from weft.core.table_spec import Eviction, RowInit, RowOptimizer

FREE = "free"  # no bound on staleness


class ClickModelSpec(Section):
    """A click model over categorical and numeric fields, or a user's own model."""

    kind: Literal["deepfm", "wide_deep", "logistic"] = Field(
        default="deepfm", description="deepfm | wide_deep | logistic"
    )
    factory: str | None = Field(
        default=None, description="'module:function' that returns your own nn.Module; replaces kind"
    )
    embedding_dim: int = Field(default=16, ge=1, description="columns of an embedding row")
    hidden: tuple[int, ...] = Field(default=(64, 32), description="widths of the deep part")


GENERATED = "clicks"


class ClickDataSpec(Section):
    source: str | list[str] = Field(
        default=GENERATED,
        description="'clicks' (a generated log), or CSV / TSV / parquet files in the Criteo layout: label, numeric "
        "fields I1.., categorical fields C1..",
    )
    samples: int = Field(default=500_000, ge=1, description="samples of the generated log")
    categorical: int = Field(default=26, ge=1, description="categorical fields")
    numeric: int = Field(default=13, ge=0, description="numeric fields")
    vocabulary: int = Field(default=1000, ge=2, description="values of a categorical field in the generated log")
    zipf: float = Field(default=1.1, gt=0, description="exponent of the distribution of values in the generated log")
    eval_fraction: float = Field(default=0.1, gt=0, lt=1, description="share of samples held out")


# Without an accumulator the first gradient of a rare row, which is mostly noise, would be a full learning rate.
_SPARSE = RowOptimizer(learning_rate=0.06, initial_accumulator=1e-4)
_DENSE = RowOptimizer(kind="adam", learning_rate=5e-3)


def _over(default: RowOptimizer, given: Any) -> Any:
    """Fill missing keys from this run's default: a learning rate alone must not turn adam into adagrad."""
    return {**default.model_dump(), **given} if isinstance(given, dict) else given


class SparseSpec(Section):
    """The table of embedding rows."""

    optimizer: RowOptimizer = _SPARSE
    init: RowInit = RowInit()
    admit_after: int = Field(default=1, ge=1, description="pushes before a key gets a row")
    eviction: Eviction = Eviction()
    tier: Literal["memory", "mapped"] = Field(default="memory", description="memory | mapped")

    @field_validator("optimizer", mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        return _over(_SPARSE, given)


class DenseSpec(Section):
    place: Literal["servers", "replicated"] = Field(
        default="servers", description="servers | replicated (with all-reduce among workers)"
    )
    optimizer: RowOptimizer = _DENSE

    @field_validator("optimizer", mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        return _over(_DENSE, given)


class ServerTrainSpec(Section):
    steps: int = Field(default=800, ge=1, description="global batches")
    global_batch: int = Field(default=512, ge=1, description="samples per step over all workers")
    seed: int = Field(default=0, ge=0, description="seed of initial values, the generated log and data order")


class ServerSpec(Section):
    servers: int = Field(default=1, ge=1, le=256, description="server processes")
    workers: int = Field(default=2, ge=1, le=4096, description="worker processes, and shares of a step")
    mode: Literal["sync", "async", "geo"] = Field(default="sync", description="sync | async | geo")
    staleness: int | Literal["free"] = Field(
        default=4, description="async: steps that a worker may be ahead of the slowest; 0 is sync; 'free'"
    )
    discount: float = Field(
        default=0.5,
        ge=0,
        description="async: power of the learning rate's discount for staleness beyond workers - 1",
    )
    geo_steps: int = Field(default=10, ge=1, description="geo: local steps between exchanges (K)")
    geo_merge: Literal["average", "sum"] = Field(default="average", description="average | sum (may diverge)")
    geo_cache_rows: int = Field(default=1_000_000, ge=1, description="geo: most rows that a worker caches")
    launcher: Literal["processes", "ray", "in_process"] = Field(
        default="processes", description="processes | ray | in_process"
    )
    durability: Literal["none", "process", "disk"] = Field(
        default="process", description="an acknowledged push survives: none | process (kill -9) | disk (power loss)"
    )
    max_restarts: int = Field(default=100, ge=0, description="restarts of servers and workers before the run fails")
    lease_s: float = Field(default=10.0, gt=0, description="a silent worker's share goes to another after this time")
    server_timeout_s: float = Field(default=60.0, gt=0, description="how long to wait for a lost server")

    @field_validator("staleness", mode="before")
    @classmethod
    def _bound(cls, given: Any) -> Any:
        if given != FREE and (not isinstance(given, int) or given < 0):
            raise ValueError("an integer of at least 0, or 'free'")
        return given

    @property
    def gate(self) -> int | None:
        """Steps that a pull may be ahead of the oldest unfinished step; None: it never waits."""
        if self.mode == "sync":
            return 0
        return self.staleness if self.mode == "async" and isinstance(self.staleness, int) else None

    @property
    def is_aggregated(self) -> bool:
        """Whether a step's gradients are summed, then applied once."""
        return self.gate == 0


class ServerEvaluationSpec(Section):
    every: int = Field(default=100, ge=0, description="steps between evaluations; 0 is only at the end")


class ServerCheckpointSpec(Section):
    every: int = Field(default=200, ge=0, description="steps between snapshots; 0 is only at the end")
    full_every: int = Field(
        default=4, ge=1, description="one snapshot in this many is full, the others are incremental"
    )


class ServerLoggingSpec(Section):
    every: int = Field(default=10, ge=1, description="steps between plain log lines without a terminal")
    tensorboard: bool = Field(default=True, description="write TensorBoard files beside metrics.jsonl")


class ServerRun(Document):
    """The complete run."""

    model: ClickModelSpec = ClickModelSpec()
    data: ClickDataSpec = ClickDataSpec()
    sparse: SparseSpec = SparseSpec()
    dense: DenseSpec = DenseSpec()
    train: ServerTrainSpec = ServerTrainSpec()
    server: ServerSpec = ServerSpec()
    evaluation: ServerEvaluationSpec = ServerEvaluationSpec()
    checkpoint: ServerCheckpointSpec = ServerCheckpointSpec()
    logging: ServerLoggingSpec = ServerLoggingSpec()


SECTIONS = sections_of(ServerRun)
