"""Activation recompute: a block's forward runs again in its backward, so fewer activations are saved in between.

| policy    | saved per block                                                | recomputed                  |
| --------- | -------------------------------------------------------------- | --------------------------- |
| none      | all that autograd saves                                        | nothing                     |
| full      | its inputs                                                     | everything                  |
| selective | its inputs, outputs of matmuls with weights, attention         | norms, activations, rotary… |
| budget    | each block as one of the three: `activations.mixture` has the counts, core/mixture.py the choice |

The scores of eager attention are not saved: selective recompute exists to drop them.
Inputs of fully recomputed blocks may wait on the host or in shares (`kept_inputs.py`).
Gathering (ZeRO-3) and reducing are hooks, outside of the recomputed forward; casts and dropout are inside. Routers do
not choose again (`router_replay.py`).
The numbers are those without recompute, bit for bit where the kernels are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from weft.core.errors import NoBlocksError
from weft.core.memory_sections import Activations
from weft.core.mixture import block_policies
from weft.engine.activations.dropout import replayed
from weft.engine.activations.kept_inputs import KeptInputs
from weft.engine.activations.recomputing import entered, recomputing
from weft.engine.activations.router_replay import Choices, chooses
from weft.engine.activations.split_backward import splitting_again
from weft.engine.buffers.changes import BufferChanges, BufferSnapshot
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ModelLayout

# Operators by packet. bmm and baddbmm are missing on purpose: they are the two products of eager attention.
_GROUPED = frozenset({"aten._grouped_mm", "transformers.grouped_mm_fallback"})
_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten._scaled_mm", "weft.scaled_mm"}) | _GROUPED
_ATTENTION = ("aten._scaled_dot_product_", "aten._flash_attention_forward", "aten._efficient_attention_forward")
_COLLECTIVES = "_c10d_functional."  # sending twice costs more than saving
# Marks of the profiler around hooks of `fully_shard`, whose number differs between the two forwards of a block.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)


def apply_recompute(
    model: nn.Module,
    layout: ModelLayout,
    activations: Activations,
    changes: BufferChanges,
    *,
    own: Collection[str] | None = None,
    inputs: KeptInputs | None = None,
) -> None:
    """Wrap the blocks of the full model's `layout` by the policy of `activations`, as outermost layer so far.

    `own`: this rank's blocks in a pipeline. A block's index in the full model decides, not its index on the rank.
    `changes`: buffers change once per forward; the recomputed forward reads the values that the first one read.
    `inputs` keeps the inputs of fully recomputed blocks if it is on; otherwise autograd does, on the device.
    """
    if activations.policy == "none":
        return
    if not layout.blocks:
        raise NoBlocksError(
            "the model has no repeated blocks, so there is nothing to recompute",
            hint="name them: Engine(..., blocks=['encoder.layers']), or use activations.policy = 'none'",
        )
    policies = block_policies(activations.policy, activations.mixture, num_blocks=len(layout.blocks))
    for name, policy in zip(layout.blocks, policies, strict=True):
        if policy != "none" and (own is None or name in own):
            block = model.get_submodule(name)
            kept = inputs if inputs is not None and inputs.is_on and policy == "full" else None
            wrap_forward(block, _Recomputed(block, changes, is_selective=policy == "selective", inputs=kept))


def is_saved(operator: Any, products: Collection[str] = _PRODUCTS) -> bool:
    """Whether selective recompute saves the output of this operator."""
    packet = str(getattr(operator, "overloadpacket", operator))
    return packet in products or packet.startswith(_ATTENTION) or packet.startswith(_COLLECTIVES)


class _Recomputed:
    """The layer around one block's forward."""

    def __init__(
        self, block: nn.Module, changes: BufferChanges, *, is_selective: bool, inputs: KeptInputs | None
    ) -> None:
        self._changes, self._places = changes, changes.places_in(block)
        self._is_selective, self._chooses, self._inputs = is_selective, chooses(block), inputs
        self._products = _PRODUCTS - _GROUPED if any(map(_adds_bias_in_place, block.modules())) else _PRODUCTS

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._inputs is not None:
            return self._call_kept(self._inputs, forward, args, kwargs)
        # a keyword of the block may have the name of one of checkpoint's
        call = functools.partial(forward, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, context_fn=self._contexts)

    def _call_kept(self, inputs: KeptInputs, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Checkpoint saves no tensor: `own` has the arguments of both forwards."""
        own = inputs.of_block(args, kwargs)

        def call(_: torch.Tensor) -> Any:
            taken, named = own.take()
            return forward(*taken, **named)

        # an empty tensor: checkpoint saves the random state of the devices of its arguments
        output = checkpoint(call, own.device_mark(), use_reentrant=False, context_fn=self._contexts)
        inputs.after_block(own)
        return output

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the first forward and of the recomputed one."""
        first: AbstractContextManager[Any] = nullcontext()
        second: AbstractContextManager[Any] = nullcontext()
        if self._is_selective:
            choose = functools.partial(_choose, self._products)
            first, second = create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]
        if self._chooses:
            choices = Choices()
            first, second = entered(first, choices.recorded()), entered(second, choices.replayed())
        # a batch norm would count the same rows twice in its running statistics
        before = BufferSnapshot(self._changes, self._places)
        return first, entered(recomputing(), replayed(), splitting_again(), before.restored(), second)


def _adds_bias_in_place(module: nn.Module) -> bool:
    """Experts of transformers with biases add them to the output of a grouped product: it cannot be saved."""
    return bool(getattr(module, "has_bias", False)) and hasattr(module, "is_transposed")


def _choose(products: Collection[str], _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(operator, products) else CheckpointPolicy.PREFER_RECOMPUTE
