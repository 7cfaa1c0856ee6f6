"""`TableSpec`: one table of rows on parameter servers - its width, optimizer, initial values, admission, eviction.

Dense parameters are a table too: blocks of a flat vector, as rows. Frozen values, sent as JSON.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.core.config import Section

DENSE_TABLE = "dense"  # the blocks of a model's dense parameters
DENSE_BLOCK = 1024  # elements of a block


class RowOptimizer(Section):
    """The update that a server makes to a row; its state is stored with the row."""

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"] = Field(
        default="adagrad", description="sgd | adagrad | rowwise_adagrad | adam | ftrl"
    )
    learning_rate: float = Field(default=0.05, gt=0, description="above 0; alpha of ftrl")
    epsilon: float = Field(default=1e-8, ge=0, description="added to the denominator (adagrad, rowwise_adagrad, adam)")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="decay rates of adam's moments; steps are counted by row"
    )
    initial_accumulator: float = Field(
        default=0.0, ge=0, description="initial sum of squares (adagrad, rowwise_adagrad, ftrl)"
    )
    beta: float = Field(default=1.0, ge=0, description="beta of ftrl")
    l1: float = Field(default=0.0, ge=0, description="L1 regularisation of ftrl")
    l2: float = Field(default=0.0, ge=0, description="L2 regularisation of ftrl")


class RowInit(Section):
    """A row's first value: a function of (seed, key, column) only, independent of server and order."""

    kind: Literal["uniform", "normal", "zeros"] = Field(default="uniform", description="uniform | normal | zeros")
    scale: float = Field(default=0.01, ge=0, description="half the width of uniform, the deviation of normal")
    seed: int = Field(default=0, ge=0, description="seed of the initial values")


class Eviction(Section):
    """The rows that `shrink` drops; a row's age and score count from the last push that touched it."""

    max_age: int | None = Field(default=None, ge=1, description="updates of the table since a row was last touched")
    min_count: int | None = Field(default=None, ge=1, description="rows that were touched less often are dropped")
    max_rows: int | None = Field(
        default=None,
        ge=1,
        description="most rows per server; the least often, then least recently touched are dropped first",
    )


class TableSpec(Section):
    name: str = Field(min_length=1, max_length=64, description="unique in the job")
    dim: int = Field(ge=1, le=65536, description="columns of a row")
    optimizer: RowOptimizer = RowOptimizer()
    init: RowInit = RowInit()
    admit_after: int = Field(
        default=1,
        ge=1,
        description="pushes that a key needs before it gets a row; until then its gradients are dropped",
    )
    eviction: Eviction = Eviction()
    tier: Literal["memory", "mapped"] = Field(
        default="memory", description="memory | mapped (rows in a file that the kernel pages; only the index in memory)"
    )
