"""Where tensor parallelism may cut a model: regions between which activations are whole, how each parameter divides.

It describes; it changes nothing and knows no degree. `tensor_finder` fills it from a model's structure, `engine.tp`
carries it out. Everything inside a region is computed on a slice (of heads, of a width); a region's output is the sum
of its slices. A parameter that no region and no table names stays replicated, and the layout says why.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`units` x `size` features that are dealt out in runs of whole units: heads of a projection, columns of an MLP."""

    units: int
    size: int = 1
    may_repeat: bool = False  # fewer units than ranks: neighbours hold the same one (key-value heads)

    @property
    def features(self) -> int:
        return self.units * self.size


Segments = tuple[Segment, ...]  # one after the other along a dimension, each dealt out by itself


@dataclass(frozen=True, kw_only=True)
class LinearCut:
    """A linear module of a region: "column" cuts its outputs, "row" its inputs. Grids cut both."""

    name: str  # of the module
    side: Literal["column", "row"]
    outputs: Segments
    inputs: Segments
    is_transposed: bool = False  # weight stored as [inputs, outputs] (GPT-2's Conv1D)


@dataclass(frozen=True, kw_only=True)
class TensorCut:
    """A bare parameter inside a region, cut along one dimension of its own: experts' matrices, attention sinks."""

    name: str  # of the parameter
    dim: int
    segments: Segments


@dataclass(frozen=True, kw_only=True)
class WideNorm:
    """A norm inside a region over features that are cut: its statistics span the ranks, its weight is cut."""

    name: str  # of the module
    segments: Segments


Quantity = Literal["heads", "kv_heads", "heads_per_kv", "width", "kv_width"]


@dataclass(frozen=True, kw_only=True)
class Region:
    """One part of a block whose work is divided. Its hidden states enter at each module of `entries`."""

    kind: Literal["attention", "mlp", "experts"]
    name: str  # of the module that holds it
    entries: tuple[str, ...]  # modules whose floating tensors of hidden width are whole outside and used sliced inside
    linears: tuple[LinearCut, ...] = ()
    tensors: tuple[TensorCut, ...] = ()
    wide_norms: tuple[WideNorm, ...] = ()
    leaves_at: str | None = None  # a module whose output is a partial sum, where no row linear ends the region
    heads: Segment | None = None  # query heads
    kv_heads: Segment | None = None
    attributes: dict[str, Quantity] = field(
        default_factory=dict
    )  # sizes the module keeps: "num_heads", "config.n_head"
    partial: tuple[str, ...] = ()  # parameters used inside and not cut: each rank has its share of their gradient


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """A model as tensor parallelism sees it. `replicated` maps each parameter that stays whole to the reason."""

    regions: tuple[Region, ...]
    embedding: str | None  # the token table, cut by vocabulary
    head: str | None  # the output head, cut by vocabulary; may be tied to the table
    hidden_size: int
    replicated: dict[str, str]
    mixers: tuple[str, ...] = ()  # replicated modules inside blocks that need the whole sequence (a state-space mixer)
    norms: tuple[str, ...] = ()  # modules that normalise the residual stream: per token, over the hidden size
    refusals: dict[str, str] = field(default_factory=dict)  # "sequence_parallel" | "grid" | "loss_parallel" -> why not

    def within(self, parameters: Container[str]) -> TensorLayout:
        """Of what is cut, that which these parameters are part of: a pipeline's stages."""

        def is_here(region: Region) -> bool:
            names = [*(f"{linear.name}.weight" for linear in region.linears), *(cut.name for cut in region.tensors)]
            return any(name in parameters for name in names)

        return replace(
            self,
            regions=tuple(region for region in self.regions if is_here(region)),
            embedding=self.embedding if f"{self.embedding}.weight" in parameters else None,
            head=self.head if f"{self.head}.weight" in parameters else None,
        )
