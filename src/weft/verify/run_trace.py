"""Inputs and results of a run, of the one-process reference and of a plan alike: `Exercise` and `RunTrace`; and how a
reference computes: `ReferencePrecision`, `BatchSplit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weft.core.float8_section import Float8Choice, Float8Recipe
from weft.core.objective_spec import ObjectiveSpec
from weft.core.run_spec import RouterSpec, TrainSpec

Tensors = dict[str, torch.Tensor]
Batch = Mapping[str, torch.Tensor]
Aliases = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ReferencePrecision:
    """Dtypes of a reference run. All float64 is the truth; the plan's own precision shows the effect of rounding."""

    compute: torch.dtype
    master: torch.dtype
    loss_scale: float = 1.0  # multiplies the loss before a low-precision backward; gradients are divided by it
    has_8bit_moments: bool = False
    float8: Float8Choice = "none"  # linear layers that multiply in float8
    recipe: Float8Recipe = "tensorwise"
    amax_history: int = 0  # steps of the recipe delayed
    amax_margin: int = 0
    has_float8_experts: bool = False
    measure_every: int = 0  # steps after which layers of larger errors than `fallback_error` fall back
    fallback_error: float = 0.0
    has_float8_wire: bool = False  # tokens reach experts in float8
    divides_last: bool = False  # divide by the token count after the head's backward, as a fused loss does
    rounds_moments: frozenset[str] = frozenset()  # states that are rounded to bfloat16 after every update
    has_wide_router: bool = False  # routers of experts compute in float32
    has_wide_logits: bool = False  # so does the head
    has_wide_residual: bool = False  # blocks add to a float32 stream
    rounds_weights: bool = False  # the same for weights: no `master` copy outlives an update
    rounds_gradients: bool = False  # to bfloat16, as the optimizer reads them
    reduce: str = "float32"  # gradients of a rank on their way, rounded in blocks of each parameter
    chunks_per_sum: int = 1  # chunks of rows whose gradients a rank adds before
    rounds_sums: bool = False  # all ranks get the sum, as codes too
    feeds_back: bool = False  # a rank adds what the rounding lost to what it sends in the next step
    gather: str | None = None  # weights on their way to forwards, rounded in blocks of each parameter

    @property
    def has_float8(self) -> bool:
        return self.float8 != "none" or self.has_float8_wire or self.has_float8_experts

    @property
    def has_codes(self) -> bool:
        return self.reduce != "float32" or self.gather is not None

    @property
    def is_low(self) -> bool:
        is_narrow = self.compute.itemsize < self.master.itemsize or self.has_codes
        return is_narrow or self.has_8bit_moments or self.has_float8_wire


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """Split of a batch into chunks of rows; `is_reordered` sums the same numbers in another order."""

    chunk_rows: int
    is_reordered: bool = False
    ranks: int = 0  # ranks whose rows share one forward, for models whose forwards change buffers; 0: one rank's rows
    unties: bool = False  # in low precision each of two stages casts a tied weight and rounds its gradient by itself


TRUTH = ReferencePrecision(compute=torch.float64, master=torch.float64)


@dataclass(kw_only=True)
class RunTrace:
    """Results of a run: of one process, or of a plan, gathered to full tensors."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: Tensors = field(default_factory=dict)
    first_gradients: Tensors = field(default_factory=dict)
    first_weights: Tensors = field(default_factory=dict)  # after the first update
    weights: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)
    eval_losses: list[float] = field(default_factory=list)  # after the first step and after the last
    eval_swings: list[float] = field(default_factory=list)  # of those, by near-ties of experts; of a truth alone
    buffers: Tensors = field(default_factory=dict)  # those that forwards change, at the end
    biases: Tensors = field(default_factory=dict)  # of routers, at the end
    bias_loads: list[Tensors] = field(default_factory=list)  # by step and bias: choices of experts that moved it
    choices: list[Tensors] = field(default_factory=list)  # by step and module of experts; of references alone
    drops: list[dict[str, int]] = field(default_factory=list)  # by step and module: choices over capacity
    row_log_probs: list[torch.Tensor] = field(default_factory=list)  # of each step's rows by the initial weights


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """Inputs of a run: the initial values, the batches and rates of every step, and the held-out batches."""

    initial: Tensors
    frozen: frozenset[str]
    rests_low: frozenset[str] = frozenset()  # of them, what rests in the compute dtype
    batches: Sequence[Batch]
    rates: Sequence[float]
    evaluation: Sequence[Batch]
    train: TrainSpec
    clip_norm: float
    skipped: frozenset[int] = frozenset()  # steps without an update: float16 overflowed in the plan's run
    # With delayed updates: steps after which the pipeline drained for a checkpoint; steps of a layout without delays.
    restarts: frozenset[int] = frozenset()
    undelayed: frozenset[int] = frozenset()
    router: RouterSpec = field(default_factory=RouterSpec)
    matrices: frozenset[str] = frozenset()  # parameters that muon makes orthogonal
    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)


def has_experts(exercise: Exercise) -> bool:
    """Whether the model has a router: a token with nearly equal scores may send its full gradient to other experts."""
    return any(".experts." in name for name in exercise.initial)
