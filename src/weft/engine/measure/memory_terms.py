"""Assigns each live byte to a memory term, at the moment of the peak.

Weights, states, gradients and buffers that `fully_shard` gathers or reduces are found by their storages; the phase of
allocation decides the rest: from the forward it is an activation, from the backward a temporary, unless a split
backward has saved it for its weight gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.core.records import HolderRecord
from weft.core.terms import MemoryTerm as Term
from weft.engine.activations.split_backward import SplitBackward
from weft.engine.measure.tracker import BEFORE, Live, plain_tensors
from weft.engine.weights.units import groups_of

if TYPE_CHECKING:
    from weft.engine.engine import Engine

LARGEST = 12


def holders_of(engine: Engine, live: Mapping[int, Live], *, weights: Sequence[torch.Tensor]) -> list[HolderRecord]:
    """The holders of the live bytes, largest first: tensors of one term, place and shape are one holder.

    They sum up to all live bytes. `weights` are the parameters as they are between steps.
    """
    owner = _owners(engine, weights)
    shapes = {tuple(parameter.shape) for parameter in engine.model.parameters()}
    vocab_size = _vocab_size(engine)
    waiting = {part.untyped_storage()._cdata for one in SplitBackward.alive for part in one.gradients}
    found: dict[tuple[Any, ...], list[int]] = {}
    for key, entry in live.items():
        term = owner.get(key) or _by_origin(entry, shapes, vocab_size)
        term = Term.ACTIVATIONS if term is Term.TEMPORARIES and key in waiting else term
        place = (term, _any_block(entry.module), entry.operator, entry.phase, entry.shape, entry.dtype)
        found.setdefault(place, []).append(entry.nbytes)
    holders = [
        HolderRecord(
            term=str(term),
            nbytes=sum(sizes),
            count=len(sizes),
            module=module,
            operator=operator,
            phase=phase,
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
        )
        for (term, module, operator, phase, shape, dtype), sizes in found.items()
    ]
    return sorted(holders, key=lambda holder: -holder.nbytes)


def teacher_of(engine: Engine) -> nn.Module | None:
    """The frozen model of a distillation, which the objective holds."""
    found: nn.Module | None = getattr(engine.objective, "teacher", None)
    return found


def _any_block(module: str) -> str:
    """layers.3.mlp and layers.4.mlp both become layers.*.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def _by_origin(entry: Live, shapes: set[tuple[int, ...]], vocab_size: int) -> Term:
    # a block's tensors may be as wide as a small vocabulary
    in_block = _any_block(entry.module) != entry.module
    if len(entry.shape) >= 2 and entry.shape[-1] == vocab_size and entry.shape not in shapes and not in_block:
        return Term.LOGITS
    if entry.phase == "forward":
        is_cast = entry.operator.startswith("aten._to_copy") and entry.shape in shapes
        return Term.GATHERED if is_cast else Term.ACTIVATIONS
    return Term.OTHER if entry.phase == BEFORE else Term.TEMPORARIES


def _vocab_size(engine: Engine) -> int:
    config = getattr(engine.model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return int(getattr(text, "vocab_size", None) or 0)


def _owners(engine: Engine, weights: Sequence[torch.Tensor]) -> dict[int, Term]:
    """Storage -> term, for every storage with an owner."""
    found: dict[int, Term] = {}
    states = (value for state in engine.optimizer.state.values() for value in state.values())
    gradients = [parameter.grad for parameter in engine.parameters if parameter.grad is not None]
    _claim(found, _gathered(engine), Term.GATHERED)
    _claim(found, _reducing(engine), Term.COMM_BUFFERS)
    _claim(found, _waiting(engine), Term.GRADIENTS)
    _claim(found, [*gradients, *engine.strategy.gradient_buckets()], Term.GRADIENTS)
    for term, tensors in engine.updates.held_tensors():
        _claim(found, tensors, term)
    _claim(found, [*engine.inputs.device_tensors(), *engine.inputs.host_tensors()], Term.ACTIVATIONS)
    if engine.offload is not None:
        _claim(found, engine.offload.device_tensors(), Term.TEMPORARIES)
    _claim(found, engine.model.buffers(), Term.BUFFERS)
    if (teacher := teacher_of(engine)) is not None:
        _claim(found, teacher.buffers(), Term.BUFFERS)
        _claim(found, teacher.parameters(), Term.WEIGHTS)
    has_weights_away = engine.plan.offload.parameters != "none"  # then shards are here on their way alone
    _claim(found, weights, Term.COMM_BUFFERS if has_weights_away else Term.WEIGHTS)
    _claim(found, (value for value in states if isinstance(value, torch.Tensor)), Term.OPTIMIZER_STATE)
    _claim(found, engine.strategy.errors.values(), Term.OPTIMIZER_STATE)
    return found


def _claim(found: dict[int, Term], tensors: Iterable[torch.Tensor], term: Term) -> None:
    for tensor in tensors:
        for part in plain_tensors(tensor):
            found[part.untyped_storage()._cdata] = term


def _gathered(engine: Engine) -> Iterable[torch.Tensor]:
    for group in groups_of(engine.model):
        if (secondary := getattr(group._all_gather_comm, "kept", None)) is not None:
            yield secondary
        for parameter in group.fsdp_params:
            yield from getattr(parameter, "all_gather_outputs", ())
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                yield unsharded


def _reducing(engine: Engine) -> Iterable[torch.Tensor]:
    """Inputs of reduce-scatters in flight."""
    for group in groups_of(engine.model):
        context = group.comm_ctx
        states = getattr(context, "reduce_scatter_states", None)  # torch 2.13; before it there was one at most
        for state in states if states is not None else [getattr(context, "reduce_scatter_state", None)]:
            if state is not None:
                yield state.reduce_scatter_input


def _waiting(engine: Engine) -> Iterable[torch.Tensor]:
    """Gradients accumulated unsharded until the last micro-batch: cast ones in one attribute, others in another."""
    for group in groups_of(engine.model) if engine.strategy.accumulates_unsharded else ():
        for parameter in group.fsdp_params:
            accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
            unsharded = getattr(parameter, "_unsharded_param", None)
            waiting = (accumulated, unsharded.grad if unsharded is not None else None)
            yield from (gradient for gradient in waiting if gradient is not None)
