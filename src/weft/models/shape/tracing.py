"""Traces one block's forward on the meta device: every tensor that autograd saves, and how it would be divided.

`Tracer` follows each storage through the operators: products with a column-parallel matrix are split by tensor
parallelism, products with a row-parallel one are full again. Hooks on the block's modules (`install_hooks`) tell it
where regions begin and end. It changes nothing in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.core.model_shape import BlockShape
from weft.models.ep.shared import shared_after
from weft.models.tp.layout import Region, TensorLayout

Spread = Literal["full", "key_value", "fused", "split"]  # how tensor parallelism would divide a tensor
_ORDER: tuple[Spread, ...] = ("full", "key_value", "fused", "split")


@dataclass(kw_only=True)
class SavedTensor:
    """One storage that autograd keeps."""

    nbytes: int
    elements: int
    spread: Spread
    scopes: set[str]  # regions and replicated mixers that save it; "" for the residual stream
    is_routed: bool = False
    is_fused_output: bool = False

    @property
    def component(self) -> tuple[object, ...]:
        return (self.spread, len(self.scopes - {""}), self.is_routed, self.is_fused_output)


@dataclass(kw_only=True)
class BlockRecord:
    """Saved tensors of one block, in order, and facts of its forward."""

    hidden_size: int
    saved: dict[int, SavedTensor] = field(default_factory=dict)
    is_parallel: bool = False
    weighs_in_float32: bool = False
    num_weights: int = 0
    num_choices: int = 0
    saves_after_exit: bool = True
    saves_after_experts: bool = False

    def entered_mlp(self, *, is_after_attention: bool) -> None:
        self.is_parallel = self.is_parallel or not is_after_attention

    def entered_experts(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """The first tensor is the hidden states; the others are the router's weights and choices."""
        for one in tensors_in((args, kwargs))[1:]:
            if one.is_floating_point():
                self.num_weights += 1
            else:
                self.num_choices += 1


class Tracer(TorchDispatchMode):
    """Follows each storage: how it would be divided, and whether it depends on attention's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spreads: dict[int, Spread] = {}
        self.after_attention: set[int] = set()
        self.fused: set[int] = set()
        self.scopes: list[str] = [""]
        self.is_in_experts = False
        self._known = {_key(one) for one in model.parameters()}
        self._alive: list[Any] = []  # a freed storage's address would be used again
        self._outside: set[int] | None = None
        self._sharded: dict[int, Spread] = {}

    @contextmanager
    def recording(self, stream: list[torch.Tensor]) -> Iterator[None]:
        """Count tensors that are created from here on, and the block's inputs."""
        self._outside = set(self.spreads) - {_key(one) for one in stream}
        self.scopes = [""]
        self.after_attention.clear()
        for one in stream:
            self.spreads[_key(one)] = "full"
        try:
            yield
        finally:
            self._outside = None

    def shard(self, parameter: torch.Tensor, spread: Spread) -> None:
        """`spread` of every product with `parameter`."""
        self._sharded[_key(parameter)] = spread

    def set_spread(self, value: Any, spread: Spread, *, is_fused_output: bool = False) -> None:
        for one in tensors_in(value):
            self.spreads[_key(one)] = spread
            if is_fused_output:
                self.fused.add(_key(one))

    def mark_after_attention(self, value: Any) -> None:
        self.after_attention |= {_key(one) for one in tensors_in(value)}

    def is_after_attention(self, value: Any) -> bool:
        return any(_key(one) in self.after_attention for one in tensors_in(value))

    def save(self, record: BlockRecord, value: torch.Tensor) -> torch.Tensor:
        key = _key(value)
        if key in self._known or self._outside is None or key in self._outside:
            return value
        storage = value.untyped_storage()
        found = record.saved.get(key)
        if found is None:
            found = record.saved[key] = SavedTensor(
                nbytes=storage.nbytes(),
                elements=storage.nbytes() // value.itemsize,
                spread=self.spreads.get(key, "full"),
                scopes=set(),
                is_fused_output=key in self.fused,
            )
        found.scopes.add(self.scopes[-1])
        is_wide = is_stream(value, record.hidden_size)
        found.is_routed = found.is_routed or (self.is_in_experts and is_wide and found.spread == "full")
        record.saves_after_exit = record.saves_after_experts = True
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool  # a mask without padding, position 0: meta tensors have no values
        out = func(*args, **(kwargs or {}))
        inputs = [_key(one) for one in tensors_in((args, kwargs))]
        spread = self._spread(inputs)
        is_after = any(key in self.after_attention for key in inputs)
        for one in tensors_in(out):
            key = _key(one)
            if key in inputs and key in self.spreads:
                continue  # a view
            if key in self._known or key in inputs:
                continue
            self.spreads[key] = spread
            self._alive.append(one)
            if is_after:
                self.after_attention.add(key)
        return out

    def _spread(self, inputs: list[int]) -> Spread:
        forced = next((self._sharded[key] for key in inputs if key in self._sharded), None)
        if forced is not None:
            return forced
        return max((self.spreads.get(key, "full") for key in inputs), key=_ORDER.index, default="full")


def is_stream(value: Any, hidden_size: int) -> bool:
    """Whether it is a tensor of hidden states."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1:] == (hidden_size,)


def _key(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


@contextmanager
def install_hooks(
    block: nn.Module, name: str, shape: BlockShape, tensors: TensorLayout, tracer: Tracer, record: BlockRecord
) -> Iterator[None]:
    """Hooks on the block's modules that tell the tracer where activations are divided and gathered."""
    inside = [region for region in tensors.regions if f"{region.name}.".startswith(f"{name}.")]
    mixers = [mixer for mixer in tensors.mixers if f"{mixer}.".startswith(f"{name}.")]

    def find(full: str) -> nn.Module:
        return block.get_submodule(full.removeprefix(name).removeprefix(".")) if full != name else block

    handles: list[Any] = []
    for region in inside:
        handles += _region_hooks(region, find, tracer, record, is_block=region.name == name)
    for mixer in mixers:
        handles += _scope_hooks(find(mixer), mixer, tracer)
    homes = {linear.name.rpartition(".")[0] for linear in shape.linears if linear.role == "attention" and linear.active}
    for home in homes:  # replicated attention, too
        module = block.get_submodule(home) if home else block
        handles.append(module.register_forward_hook(lambda _, __, out: tracer.mark_after_attention(out)))
    for linear in shape.linears:
        if linear.role == "mlp" and shape.attention is not None and "*" not in linear.name:
            module = block.get_submodule(linear.name)
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args: record.entered_mlp(is_after_attention=tracer.is_after_attention(args))
                )
            )
    if shape.moe is not None:
        homes = {linear.name.rpartition(".")[0] for linear in shape.linears if linear.role == "expert"}
        for home in homes:
            if "*" not in home:
                handles += _expert_hooks(block.get_submodule(home), shape.moe.top_k, tracer, record)
                handles += _shared_hooks(shared_after(block, home), record)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _region_hooks(
    region: Region, find: Callable[[str], nn.Module], tracer: Tracer, record: BlockRecord, *, is_block: bool
) -> list[Any]:
    handles: list[Any] = []
    if not is_block:
        handles += _scope_hooks(find(region.name), region.name, tracer)
    for linear in region.linears:
        module = find(linear.name)
        if is_block:
            handles += _scope_hooks(module, region.name + region.kind, tracer)
        is_repeated = [one.may_repeat for one in linear.outputs]
        spread: Spread = "key_value" if all(is_repeated) else "fused" if any(is_repeated) else "split"
        if linear.side == "row":
            handles.append(module.register_forward_hook(partial(_leave, tracer, record, region)))
        else:
            handles.append(
                module.register_forward_hook(
                    lambda _, __, out, spread=spread: tracer.set_spread(out, spread, is_fused_output=spread == "fused")
                )
            )
    for tensor in region.tensors:
        parameter = find(tensor.name.rpartition(".")[0])._parameters[tensor.name.rpartition(".")[2]]
        is_row = region.kind == "experts" and tensor.name.endswith("down_proj")
        if parameter is not None:
            tracer.shard(parameter, "full" if is_row else "split")
    if region.kind == "experts":
        handles.append(find(region.name).register_forward_pre_hook(record.entered_experts, with_kwargs=True))
    if region.leaves_at is not None:
        handles.append(find(region.leaves_at).register_forward_hook(partial(_leave, tracer, record, region)))
    return handles


def _leave(tracer: Tracer, record: BlockRecord, region: Region, _: nn.Module, __: Any, out: Any) -> None:
    """The output of a region is full again; nothing is saved after it yet."""
    tracer.set_spread(out, "full")
    record.saves_after_exit = False
    if region.kind == "attention":
        tracer.mark_after_attention(out)


def _scope_hooks(module: nn.Module, scope: str, tracer: Tracer) -> list[Any]:
    return [
        module.register_forward_pre_hook(lambda _, __: tracer.scopes.append(scope)),
        module.register_forward_hook(lambda _, __, ___: tracer.scopes.pop() and None),
    ]


def _shared_hooks(module: nn.Module | None, record: BlockRecord) -> list[Any]:
    """With expert parallelism these are computed before the outputs of the other experts arrive."""
    before: list[bool] = []

    def enter(*_: Any) -> None:
        before.append(record.saves_after_experts)

    def leave(*_: Any) -> None:
        record.saves_after_experts = before.pop()

    return [] if module is None else [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _expert_hooks(module: nn.Module, top_k: int, tracer: Tracer, record: BlockRecord) -> list[Any]:
    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        tracer.is_in_experts = True
        weights = [one for one in tensors_in((args, kwargs)) if one.shape[-1:] == (top_k,) and one.is_floating_point()]
        record.weighs_in_float32 = any(one.dtype == torch.float32 for one in weights)

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        tracer.is_in_experts = False
        record.saves_after_experts = False

    return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
