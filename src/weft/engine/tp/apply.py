"""From a plan's tensor parallelism to a sharded model: find the layout, check it, shard parameters, add layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from weft.core.axes import TP
from weft.core.errors import TensorParallelError
from weft.core.plan import TensorParallel
from weft.core.shards import LocalShard
from weft.engine.mesh import Topology
from weft.engine.tp.activation_layout import ActivationLayout
from weft.engine.tp.chunked_loss import HeadShard
from weft.engine.tp.context import TPContext
from weft.engine.tp.cross_entropy import VocabularyLoss
from weft.engine.tp.grid import TP_GROUP, Grid, build_grid
from weft.engine.tp.one_d import apply_one_d, num_tokens
from weft.engine.tp.one_d_shards import one_d_shards, repeats
from weft.engine.weights.local_shards import shard_parameters
from weft.models.layout import ModelLayout
from weft.models.tp.finder import find_tensor_layout
from weft.models.tp.layout import TensorLayout


def apply_tensor_parallel(
    model: nn.Module,
    layout: ModelLayout,
    policy: TensorParallel,
    topology: Topology,
    *,
    keep_logits_full: bool,
    divided: Sequence[str] = (),
) -> TPContext:
    """Shard `model` in one dimension. `keep_logits_full`: a user's loss needs the full logits.

    `divided`: modules of experts that expert parallelism divides over these ranks.
    """
    tensors = find_regions(model, layout).without(divided)
    grid = build_grid(
        "1d",
        topology.group(TP),
        axis_ranks=topology.tp_rank_lists,
        repeats=repeats(tensors, topology.tp_degree),
        owner=topology.groups,
    )
    if policy.sequence_parallel and "sequence_parallel" in tensors.refusals:
        raise TensorParallelError(
            f"sequence parallel does not work with {type(model).__name__}: {tensors.refusals['sequence_parallel']}",
            hint="set tensor_parallel.sequence_parallel = false",
        )
    shards = one_d_shards(
        model, layout, tensors, degree=grid.degree, place=grid.rank, sequence_parallel=policy.sequence_parallel
    )
    of_others = tuple(f"{name}." for name in divided)
    shards = {name: shard for name, shard in shards.items() if not name.startswith(of_others)}
    shard_parameters(model, layout, shards)
    activations = ActivationLayout(place=grid.rank, degree=grid.degree, sequence_parallel=policy.sequence_parallel)
    is_loss_sharded = policy.loss_parallel and tensors.head is not None and not keep_logits_full
    apply_one_d(model, layout, tensors, grid, activations, loss_parallel=is_loss_sharded)
    head = _head_shard(model, layout, tensors, shards, grid) if tensors.head is not None else None
    loss = None
    if head is not None and is_loss_sharded:
        loss = VocabularyLoss(first_token=head.first_token, group=grid.group(TP_GROUP))
    return TPContext(
        grid=grid,
        shards=shards,
        replicated_reasons=tensors.replicated,
        layout=tensors,
        activation_layout=activations,
        token_loss=loss,
        head=head,
        owns_loss=grid.rank == 0,
    )


def find_regions(model: nn.Module, layout: ModelLayout) -> TensorLayout:
    """The tensor layout of `model`, which must have a region."""
    tensors = find_tensor_layout(model, layout)
    require_regions(tensors, type(model).__name__)
    return tensors


def require_regions(tensors: TensorLayout, model_name: str) -> None:
    if not tensors.regions:
        # the most frequent reason other than that norms are never sharded
        reasons = Counter(reason for reason in tensors.replicated.values() if reason != "a norm")
        reason = reasons.most_common(1)[0][0] if reasons else "it has no known attention or feed-forward layer"
        raise TensorParallelError(
            f"no layer of {model_name} can be sharded over tensor-parallel ranks: {reason}",
            hint="use mesh.tp = 1; ZeRO-3 (data_parallel.zero = 3) shards any model",
        )


def _head_shard(
    model: nn.Module, layout: ModelLayout, tensors: TensorLayout, shards: dict[str, LocalShard], grid: Grid
) -> HeadShard:
    vocabulary = num_tokens(model, str(tensors.head))
    return HeadShard(
        first_token=_first_token(shards, tensors, layout),
        most_tokens=-(-vocabulary // grid.degree),
        group=grid.group(TP_GROUP),
    )


def _first_token(shards: dict[str, LocalShard], tensors: TensorLayout, layout: ModelLayout) -> int:
    """The first token of this rank's slice of the vocabulary."""
    name = f"{tensors.head}.weight"
    return shards[layout.ties.get(name, name)].chunks[0].offsets[0]
