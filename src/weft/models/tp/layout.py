"""Tensor-parallel shards of a model: regions between which activations are full, and the shards of each parameter.

A description for any degree; it changes nothing. `finder` fills it from a model's structure, `engine.tp` and
`engine.tp_grid` apply it. A rank computes its slice (of heads, of a width) of a region; the region's output is the sum
of the slices. Every other parameter stays replicated, and the layout holds the reason.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`units` x `size` features that are sharded in full units: heads of a projection, columns of an MLP."""

    units: int
    size: int = 1
    may_repeat: bool = False  # fewer units than ranks: neighbours hold the same one (key-value heads)

    @property
    def features(self) -> int:
        return self.units * self.size


Segments = tuple[Segment, ...]  # consecutive along a dimension, each divided separately


@dataclass(frozen=True, kw_only=True)
class LinearShards:
    """A linear module of a region: "column" shards its outputs, "row" its inputs. Grids shard both."""

    name: str  # of the module
    side: Literal["column", "row"]
    outputs: Segments
    inputs: Segments
    is_transposed: bool = False  # weight stored as [inputs, outputs] (GPT-2's Conv1D)


@dataclass(frozen=True, kw_only=True)
class ParameterShards:
    """A bare parameter inside a region, sharded along one dimension: experts' matrices, attention sinks."""

    name: str  # of the parameter
    dim: int
    segments: Segments


@dataclass(frozen=True, kw_only=True)
class WideNorm:
    """A norm inside a region over sharded features: its statistics span the ranks, its weight is sharded."""

    name: str  # of the module
    segments: Segments


Quantity = Literal["heads", "kv_heads", "heads_per_kv", "width", "kv_width"]


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a block whose work is sharded. Its hidden states enter at each module of `entries`."""

    kind: Literal["attention", "mlp", "experts"]
    name: str  # of the module that holds it
    entries: tuple[str, ...]  # modules whose floating inputs of hidden width are full outside the region
    linears: tuple[LinearShards, ...] = ()
    tensors: tuple[ParameterShards, ...] = ()
    wide_norms: tuple[WideNorm, ...] = ()
    leaves_at: str | None = None  # a module whose output is a partial sum, in regions without a row linear
    heads: Segment | None = None  # query heads
    kv_heads: Segment | None = None
    attributes: dict[str, Quantity] = field(
        default_factory=dict
    )  # attributes of the module with sizes: "num_heads", "config.n_head"
    partial: tuple[str, ...] = ()  # replicated parameters used inside: each rank has a partial sum of their gradient


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """The tensor-parallel layout of a model. `replicated`: the reason for every parameter that is not sharded."""

    regions: tuple[Region, ...]
    embedding: str | None  # the token table, sharded by vocabulary
    head: str | None  # the output head, sharded by vocabulary; may be tied to the table
    hidden_size: int
    replicated: dict[str, str]
    mixers: tuple[str, ...] = ()  # replicated modules inside blocks that need the full sequence (a state-space mixer)
    norms: tuple[str, ...] = ()  # modules that normalise the residual stream: per token, over the hidden size
    refusals: dict[str, str] = field(default_factory=dict)  # "sequence_parallel" | "grid" | "loss_parallel" -> why not

    def without(self, modules: Sequence[str]) -> TensorLayout:
        """Drop the regions and parameters of modules that another axis divides."""
        inside = tuple(f"{module}." for module in modules)
        return replace(
            self,
            regions=tuple(region for region in self.regions if region.name not in modules),
            replicated={name: why for name, why in self.replicated.items() if not name.startswith(inside)},
        )

    def within(self, parameters: Container[str]) -> TensorLayout:
        """Restrict the layout to these parameters (a pipeline stage's)."""

        def is_here(region: Region) -> bool:
            names = [f"{linear.name}.weight" for linear in region.linears] + [one.name for one in region.tensors]
            return any(name in parameters for name in names)

        return replace(
            self,
            regions=tuple(region for region in self.regions if is_here(region)),
            embedding=self.embedding if f"{self.embedding}.weight" in parameters else None,
            head=self.head if f"{self.head}.weight" in parameters else None,
        )
