"""Weights that forwards compute with: all copies of a parameter have equal bits, in every forward of a step.

Copies: replicas of data parallelism, weights gathered from shards (as codes too), parameters that tensor parallelism
replicates, tied parameters on two pipeline stages. Losses and final weights miss a copy that differs by a rounding: it
is gathered from other values, or is none of the values that a checkpoint has. Hooks see the weights of a unit when its
forward begins, and those of a module inside (casts, weights of a recomputed forward) unless the block is compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.core.shards import LocalShard
from weft.engine.engine import Engine
from weft.engine.kernels.float8 import Float8Linear
from weft.verify.verdict import Check, Finding

NAME, RULE = "forward weights", 14
# a block of a full tensor in one dtype: (parameter, dtype, offsets, sizes)
Copy = tuple[str, str, tuple[int, ...], tuple[int, ...]]
# by copy, the rank's own name of the parameter and a digest per forward; a single one if all are equal
Seen = dict[Copy, tuple[str, list[int]]]


class WeightWatch:
    """Digests of the weights of this rank's forwards, by step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: list[Seen] = []
        self._names = {id(module): f"{name}." if name else "" for name, module in engine.model.named_modules()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one step."""
        self._steps.append({})
        hooks = [module.register_forward_pre_hook(partial(self._look, owners)) for module, owners in self._watched()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def gather(self) -> list[list[Seen]]:
        """By step and rank. Collective."""
        held: list[list[Seen]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, self._steps)
        return [list(of_ranks) for of_ranks in zip(*held, strict=True)]

    def _watched(self) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        """Modules whose forwards begin with weights in place, and the modules that have these weights."""
        engine = self._engine
        model, blocks = engine.model, set(map(engine.model.get_submodule, engine.layout.blocks))
        units = {model, *blocks, *(one for one in model.modules() if isinstance(one, FSDPModule))}
        is_compiled = engine.plan.compile.enabled
        for unit in units:
            inside = [one for one in _within(unit, units) if any(True for _ in one.parameters(recurse=False))]
            yield unit, inside
            if not (is_compiled and unit in blocks):
                yield from ((module, [module]) for module in inside if module is not unit)

    def _look(self, owners: Sequence[nn.Module], _module: nn.Module, _args: Any) -> None:
        for owner in owners:
            for name, value in _weights_of(owner, self._names[id(owner)]):
                self._add(name, value.detach())

    def _add(self, name: str, value: Tensor) -> None:
        layout = self._engine.layout
        own_name = layout.ties.get(name, name)
        shard, first_name = self._engine.shards.get(own_name), layout.copies.get(own_name, own_name)
        for offsets, sizes, part in _parts(value, shard):
            key = (first_name, str(value.dtype).removeprefix("torch."), offsets, sizes)
            self._steps[-1].setdefault(key, (name, []))[1].append(digest(part))


def digest(tensor: Tensor) -> int:
    """62 bits of a hash of the tensor's bytes."""
    copy = tensor.to("cpu", copy=True)  # numpy would fix the size of memory that fully_shard frees
    data = copy.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 2


def check_forward_weights(
    steps: Sequence[Sequence[Seen]], *, never_flushes: bool, describe_rank: Callable[[int], str]
) -> Check:
    """Check that copies are equal on all ranks and over the micro-batches of a step. `never_flushes`: updates are made
    between the forwards of a step, at other places on other stages; forwards of one stage are compared one by one."""
    tensors: set[Copy] = set()
    for step, of_ranks in enumerate(steps, start=1):
        finding = _differing(of_ranks, never_flushes=never_flushes, describe_rank=describe_rank)
        if finding is not None:
            return Check.failed(NAME, Finding(rule=RULE, step=step, **finding))
        tensors |= {key for seen in of_ranks for key in seen}
    where = "forward by forward on ranks of one stage" if never_flushes else "in all forwards"
    return Check.passed(NAME, f"{len(tensors)} tensors, equal bits {where}, {len(steps)} steps")


def _differing(
    of_ranks: Sequence[Seen], *, never_flushes: bool, describe_rank: Callable[[int], str]
) -> Mapping[str, Any] | None:
    first: dict[tuple[Copy, str], tuple[int, str, list[int]]] = {}
    for rank, seen in enumerate(of_ranks):
        for key, (name, digests) in seen.items():
            if not never_flushes and len(set(digests)) > 1:
                place, expected = describe_rank(rank), "equal bits in all forwards of a step"
                return {"parameter": name, "coordinates": place, "expected": expected, "found": "other bits"}
            if not never_flushes:
                digests = digests[:1]
            of_stage = name if never_flushes else ""
            known, its_name, right = first.setdefault((key, of_stage), (rank, name, digests))
            if digests != right:
                tied = f" of its tied copy {its_name}" if its_name != name else ""
                expected = f"the bits{tied} that {describe_rank(known)} computes with"
                return {
                    "parameter": name, "coordinates": describe_rank(rank), "expected": expected, "found": "other bits"
                }  # fmt: skip
    return None


def _within(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules of a unit, without those of units inside it."""
    yield unit
    for child in unit.children():
        if child not in units:
            yield from _within(child, units)


def _weights_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters as they are now; of a weight that is gathered in float8, its codes and scale."""
    codes = isinstance(module, Float8Linear) and module.gathered is not None
    for key, value in module._parameters.items():
        if codes and key == "weight":
            yield f"{prefix}weight", module.gathered  # type: ignore[misc]
            yield f"{prefix}weight", module.gathered_scale  # type: ignore[misc]
        elif value is not None and not isinstance(value, DTensor):
            yield f"{prefix}{key}", value


def _parts(value: Tensor, shard: LocalShard | None) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    """The chunks of the full tensor that a local one has; low-bit codes of several chunks are one part."""
    if shard is None or (tuple(value.shape) != shard.local_shape and value.numel() == 1):
        yield (0,) * value.ndim, tuple(value.shape), value
        return
    if tuple(value.shape) != shard.local_shape:  # codes of a frozen base, in another shape: ranks hold different ones
        places = ([*chunk.offsets, *chunk.sizes] for chunk in shard.chunks)
        yield tuple(number for place in places for number in place), tuple(value.shape), value
        return
    for chunk in shard.chunks:
        yield chunk.offsets, chunk.sizes, value[chunk.local_index]
