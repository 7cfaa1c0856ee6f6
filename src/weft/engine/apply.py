"""The one screen where a plan meets a model. The order is the subtlest fact of the system, so it is all here.

1. freeze          before wrapping: strategies look at requires_grad
2. place           a module with values: to the device, rank 0's values to all; parameters in their storage dtype
3. split           finds the pipeline's split points by running the model's own forward, so before any wrapping
4. tensor_shard    tensor, expert parallelism: parameters become this rank's shards, layers wrap forwards of modules;
                   attention gets keys of other ranks (cp); routers last: they count this rank's tokens
5. span            batch norms: statistics over the rows of all data-parallel ranks
6. keep            this rank's stages: other parameters are dropped before any memory is allocated
7. shard           fully_shard, blocks then root, still on meta (ZeRO, HSDP): a shard of a shard
8. materialise     each rank allocates and fills only its own shards
9. cast            compute dtype for unsharded strategies (sharded ones cast when they gather)
10. compile        the blocks' own forwards, innermost; a head takes its loss along
11. recompute      MLPs in chunks, then blocks: around the cast, repeated too; inside the hooks that gather and reduce
12. number         dropout by block, outside of what is repeated
13. replicate      DDP, after values exist: its buckets are real memory
14. stage          entries and exits of this rank's stages, outside of all hooks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.core.masters import has_masters_away, resting_dtype
from weft.core.open_choices import require_mixture
from weft.core.plan import Plan
from weft.core.run_spec import RouterSpec
from weft.engine.activations.dropout import number_blocks
from weft.engine.activations.kept_inputs import KeptInputs, build_kept_inputs
from weft.engine.activations.kept_tensors import apply_kept_tensors
from weft.engine.activations.recompute import apply_recompute
from weft.engine.activations.sequence_chunks import apply_sequence_chunks, find_chunked
from weft.engine.axis import Axes
from weft.engine.buffers.batch_norms import BatchNorms, apply_batch_norms
from weft.engine.buffers.changes import BufferChanges
from weft.engine.cp.apply import apply_context_parallel
from weft.engine.dp.choose import choose_strategy
from weft.engine.dp.coded import require_equal_copies
from weft.engine.dp.reduce_scatter_copy import patch_reduce_scatter_copy
from weft.engine.dp.sharded import shard_units
from weft.engine.dp.strategy import Strategy
from weft.engine.dp.threads import require_gpus
from weft.engine.kernels.compiled import apply_compile
from weft.engine.kernels.float8 import apply_float8
from weft.engine.kernels.float8_accuracy import Float8Layers
from weft.engine.kernels.head_loss import HeadLoss, fuse_loss
from weft.engine.kernels.wide_residual import widen
from weft.engine.mesh import Topology
from weft.engine.offload.weights import free_at_rest
from weft.engine.pp.apply import build_pipeline, keep_own_stages, split_pipeline
from weft.engine.pp.runtime import PipelineRuntime
from weft.engine.pp.stages import Stages
from weft.engine.precision import apply_compute_dtype, store_weights, torch_dtype
from weft.engine.router.apply import find_and_build
from weft.engine.router.routers import Routers
from weft.engine.tensor_and_expert import apply_tensor_and_expert
from weft.engine.weights.base import store_base
from weft.engine.weights.freeze import freeze
from weft.engine.weights.materialise import materialise, place_real_model
from weft.engine.weights.resting import keep_gradients_in, source_of
from weft.models.initial import WeightSource
from weft.models.layout import ModelLayout, require_blocks


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The axes of a model under a plan, and the layout of this rank's stages."""

    layout: ModelLayout
    stages: Stages | None  # of this rank, in a pipeline
    strategy: Strategy
    axes: Axes
    head_loss: HeadLoss | None  # None: the objective takes the loss of logits
    float8: Float8Layers  # linear layers of the blocks, and whether they multiply in float8
    batch_norms: BatchNorms
    changes: BufferChanges  # of buffers, in forwards
    routers: Routers  # of a mixture of experts; empty in other models
    inputs: KeptInputs  # of recomputed blocks
    masters: WeightSource | None = None  # values of masters that are offloaded states, which do not exist yet
    notes: tuple[str, ...] = ()  # settings of the plan that do not apply to this model


def apply_plan(
    model: nn.Module,
    plan: Plan,
    topology: Topology,
    *,
    layout: ModelLayout,
    device: torch.device,
    weights: WeightSource | None,
    frozen: Sequence[str] = (),
    has_own_objective: bool = False,
    reads_full_logits: bool = False,
    router: RouterSpec | None = None,
) -> Applied:
    """Apply every axis of `plan` to `model`."""
    precision, dp = plan.precision.policy(), plan.data_parallel
    require_mixture(plan, num_blocks=len(layout.blocks))
    if dp.is_threaded:
        require_gpus(precision)
    freeze(model, frozen)
    place_real_model(model, device=device)
    is_rounded, weights_leave = has_masters_away(plan), plan.offload.parameters != "none"
    masters = source_of(model, weights) if is_rounded or weights_leave else None
    store_weights(model, torch_dtype(resting_dtype(plan)), only_trained=is_rounded)
    routers = find_and_build(model, plan, router or RouterSpec(), device=device)
    mlps = find_chunked(model, layout, size=plan.activations.sequence_chunk)
    split_plan = split_pipeline(model, layout, plan.pipeline, topology) if topology.pp_degree > 1 else None
    tp, ep = apply_tensor_and_expert(model, plan, topology, layout=layout, keep_logits_full=reads_full_logits)
    cp = apply_context_parallel(model, plan, topology, layout=layout, has_own_objective=has_own_objective)
    routers.wrap()
    widen(model, layout, precision)
    batch_norms = apply_batch_norms(model, plan, topology)
    own = layout
    if split_plan is not None:
        own = keep_own_stages(model, layout, split_plan, dtype=torch_dtype(precision.weights), device=device)
        tp = tp.of_stages(own) if tp is not None else None
        ep = ep.of_stages(own) if ep is not None else None
    sharding = Axes(context for context in (tp, ep, cp) if context is not None)
    store_base(model, own, torch_dtype(precision.weights), shards=sharding.shards)
    require_equal_copies(sharding.shards, plan.coded_gather)
    if dp.zero > 0:
        require_blocks(own)
        patch_reduce_scatter_copy(plan.kernels.gradient_copy)
        experts = ep.units if ep is not None else {}
        shard_units(model, own, mesh=topology.dp_mesh, stage=dp.zero, precision=precision, experts=experts)
        if weights_leave:
            free_at_rest(model)
    materialise(model, own, weights, device=device, shards=sharding.shards, fills=masters is None)
    if precision.gradients != resting_dtype(plan):
        keep_gradients_in(model, torch_dtype(precision.gradients))
    if dp.zero == 0:
        apply_compute_dtype(model, own, precision)
    float8 = apply_float8(model, own, plan.float8, full=layout, tp=tp, device=device)
    notes = apply_compile(model, own, device=device) if plan.compile.enabled else ()
    is_fused = plan.kernels.loss == "fused" and not has_own_objective
    head, token_loss = (tp.head, tp.token_loss) if tp else (None, None)
    head_loss, why_not = fuse_loss(model, is_asked=is_fused, own=head, token_loss=token_loss)
    apply_sequence_chunks(model, mlps, size=plan.activations.sequence_chunk, own=own.blocks)
    changes = BufferChanges(model, without=routers.biases)
    inputs = build_kept_inputs(plan.activations, tp.groups if tp is not None else (), device=device)
    apply_recompute(model, layout, plan.activations, changes, own=own.blocks, inputs=inputs)
    apply_kept_tensors(model, layout, plan.activations, inputs.tensors)
    number_blocks(model, layout)
    strategy = choose_strategy(model, plan, topology)
    pp: PipelineRuntime | None = None
    if split_plan is not None:
        strategy.prefetch_within_stages([split_plan.split.stages[stage] for stage in split_plan.own])
        pp = build_pipeline(model, layout, own, split_plan, topology, device=device)
    axes = Axes((*sharding, *((pp,) if pp is not None else ()), *topology.replicated_axes()))
    routers.count_on(axes)
    return Applied(
        layout=own,
        strategy=strategy,
        stages=pp.schedule_runner.stages if pp is not None else None,
        axes=axes,
        head_loss=head_loss,
        float8=float8,
        batch_norms=batch_norms,
        changes=changes,
        routers=routers,
        inputs=inputs,
        masters=masters,
        notes=(*notes, *why_not, *batch_norms.notes),
    )
