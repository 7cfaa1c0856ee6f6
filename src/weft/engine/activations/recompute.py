"""Activation recompute: a block's forward runs again in its backward, so less is kept in between.

| policy    | kept of a block                                                | computed again              |
| --------- | -------------------------------------------------------------- | --------------------------- |
| none      | what autograd keeps                                            | nothing                     |
| full      | its inputs                                                     | everything                  |
| selective | its inputs, the products of matrices with weights, attention   | norms, activations, rotary… |
| budget    | each block as one of the three: `activations.mixture` says how many, core/mixture.py which   |

Attention that writes its scores out is no kept product: scores are what selective recompute is there to lose.
Gathering (ZeRO-3) and reducing are hooks, outside what is repeated; casts to low precision and dropout are inside.
The numbers are those without recompute, bit for bit where the kernels are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.core.errors import NoBlocksError
from weft.core.mixture import block_policies
from weft.core.plan import Activations
from weft.engine.activations.dropout import replayed
from weft.engine.activations.split_backward import splitting_again
from weft.engine.buffers.changes import Before, BufferChanges
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ModelLayout

# Operators by packet. bmm and baddbmm are missing on purpose: they are the two products of written-out attention.
_PRODUCTS = frozenset(
    {"aten.mm", "aten.addmm", "aten._scaled_mm", "aten._grouped_mm", "transformers.grouped_mm_fallback"}
)
_ATTENTION = ("aten._scaled_dot_product_", "aten._flash_attention_forward", "aten._efficient_attention_forward")
_COLLECTIVES = "_c10d_functional."  # sending twice costs more than keeping


def apply_recompute(
    model: nn.Module,
    layout: ModelLayout,
    activations: Activations,
    changes: BufferChanges,
    *,
    own: Collection[str] | None = None,
) -> None:
    """Blocks of the whole model's `layout` as `activations` says, around what is around their forwards already.

    `own`: those this rank has, of a pipeline. A block's place in the whole model decides, not its place on the rank.
    `changes`: a forward's changes of buffers are made once; the second finds what the first one found.
    """
    if activations.policy == "none":
        return
    if not layout.blocks:
        raise NoBlocksError(
            "the model has no repeated blocks, so there is nothing to compute again",
            hint="name them: Engine(..., blocks=['encoder.layers']), or use activations.policy = 'none'",
        )
    policies = block_policies(activations.policy, activations.mixture, num_blocks=len(layout.blocks))
    for name, policy in zip(layout.blocks, policies, strict=True):
        if policy != "none" and (own is None or name in own):
            block = model.get_submodule(name)
            wrap_forward(block, _Recomputed(block, changes, is_selective=policy == "selective"))


def is_kept(operator: Any) -> bool:
    """Whether selective recompute keeps what this operator gives."""
    packet = str(getattr(operator, "overloadpacket", operator))
    return packet in _PRODUCTS or packet.startswith(_ATTENTION) or packet.startswith(_COLLECTIVES)


class _Recomputed:
    """The layer around one block's forward."""

    def __init__(self, block: nn.Module, changes: BufferChanges, *, is_selective: bool) -> None:
        self._changes, self._places = changes, changes.inside(block)
        self._is_selective = is_selective

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # a block's own keyword may have the name of one of checkpoint's
        call = functools.partial(forward, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What the first forward runs in, and what the second does."""
        first: AbstractContextManager[Any] = nullcontext()
        second: AbstractContextManager[Any] = nullcontext()
        if self._is_selective:
            first, second = create_selective_checkpoint_contexts(_choose)  # type: ignore[no-untyped-call]
        # a batch norm would count the same rows twice in its running statistics
        before = Before(self._changes, self._places)
        return first, _entered(replayed(), splitting_again(), before.put_back(), second)


@contextmanager
def _entered(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _choose(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE
