"""Facts of a run as plain values, the oracle's only input. `verify/oracle_facts.py` collects them.

No computation here. Tables are the parsed run.toml; tokens, rows and tensors are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

Tensors = Mapping[str, torch.Tensor]
Tables = Mapping[str, Any]
Rows = Mapping[str, NDArray[Any]]  # a batch: input_ids, labels, perhaps position_ids, each [rows, S]


class ReadBatch(Protocol):
    """A data-parallel rank's rows of the global batch that begins at a sample of the run."""

    def __call__(self, position: int, *, dp_rank: int, dp_degree: int) -> Rows: ...


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """One split of the corpus, training or held out: its ranges of stored tokens, and its rows."""

    num_rows: int
    batch: ReadBatch
    ranges: Sequence[tuple[int, int]] = ()  # of stored tokens, in the order of the stream; none of a mixture
    documents: Sequence[tuple[int, int]] = ()  # ranges of each sample, unless rows are cut from a stream


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    tokens: NDArray[Any]  # as stored, all documents concatenated
    counted: NDArray[Any] | None = None  # whether each has a loss; None: rows are cut from a stream of text
    vocab_size: int
    end_of_document: int
    training: RankShare
    held_out: RankShare | None


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """One source of a mixture: its own [data], and its corpus as a run of it alone would read it."""

    data: Tables
    weight: float
    corpus: CorpusFacts


@dataclass(frozen=True, kw_only=True)
class MixtureFacts:
    """Several sources in place of one corpus, and the rows drawn from them."""

    sources: Sequence[SourceFacts]
    by_tokens: bool  # weights are shares of tokens, not of samples
    vocab_size: int
    end_of_document: int
    training: RankShare
    held_out: RankShare | None


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint: parameters (persistent buffers among them) and `parameter.key` states."""

    weights: Tensors
    states: Tensors


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """A finished training loop of the run, read from its folder."""

    losses: Sequence[float]
    norms: Sequence[float]
    rates: Sequence[float]
    held_out_losses: Mapping[int, float]  # by step
    skipped: frozenset[int]  # steps from 0 that made no update
    saved_steps: Sequence[int]
    saved: Callable[[int], Saved]
    export: Path
    # the one-process reference of the same run, in float64 and in the plan's precision: the effect of rounding
    truth_losses: Sequence[float]
    same_losses: Sequence[float]
    truth_norms: Sequence[float]
    same_norms: Sequence[float]
    least_losses: tuple[float, float]
    least_norms: tuple[float, float]
    compute: str  # the format of forward and backward
    coarsest: str  # the format with the largest roundoff: float8 operands may be coarser than `compute`
    starts_rounded: bool  # initial values are rounded to bfloat16
    at_rest: Tensors  # of them those of an adapter's base that rest in the compute format
    has_coded_sums: bool  # gradients are rounded on their way over the ranks: 'coded sums' checks them
    rounded_states: str  # why updates are not judged element by element; empty if states are stored in float32
    is_delayed: bool  # micro-batches of a step read weights of several updates
    chunk_rows: int  # rows of one micro-batch of one rank


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """All facts of a run and a plan that the oracle checks."""

    run: Tables  # as given
    loop_run: Tables  # as trained by the loop: fewer steps
    config: Any  # the Hugging Face config that the run builds its model from
    initial: Tensors
    pretrained: Tensors | None  # as read from the run's model folder; None for random weights
    without_rule: frozenset[str]  # parameters that the model's own code does not initialise
    rate: Callable[[int], float]  # the run's learning rate by step, from 1
    corpus: CorpusFacts | MixtureFacts
    dp_degree: int
    loop: LoopFacts
