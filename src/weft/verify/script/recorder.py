"""Records a running script by optimizer step: losses, input rows, full gradients, weights; ends it after some steps.

A step belongs to the first optimizer that steps; other optimizers are recorded at their own step of the same number.

    forward of a root module -> hashes of its rows      backward -> loss      clip or step -> gradients -> rates
    step number `steps` of every optimizer -> weights, files, SystemExit(0)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from weft.core.errors import NotBuiltError
from weft.verify.script.rows import digest_of, row_hashes
from weft.verify.script.trace import ScriptTrace, Tensors, write_trace
from weft.verify.tolerances import UNIT_ROUNDOFF

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class ScriptRecorder:
    """The state of one rank. `perturbed`: every gradient is rounded otherwise, to measure the effect of rounding."""

    def __init__(
        self, folder: Path, *, steps: int, rank: int, world_size: int, perturbed: bool = False, batch_scale: int = 1
    ) -> None:
        self.trace = ScriptTrace(rank=rank, world_size=world_size)
        self.batch_scale = batch_scale
        self.is_backward = False
        self._folder, self._steps, self._perturbed = folder, steps, perturbed
        self._roots: list[nn.Module] = []
        self._names: dict[int, str] = {}  # of parameters, by id
        self._counts: dict[int, int] = {}  # finished steps by id of the optimizer, the first one first
        self._optimizers: list[Optimizer] = []  # referenced, so that no id is used twice
        self._noted: set[int] = set()  # parameters whose gradients of this step are recorded
        self._loss: float | None = 0.0
        self._rows: list[str] = []
        self._depth = self._step_depth = 0
        self._dtypes: set[str] = set()
        self._gradients: Tensors = {}
        self._initial: Tensors = {}
        self._weights: Tensors = {}
        self._is_written = False

    @contextmanager
    def forward(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around every call of a module; the outermost one with parameters is the model."""
        if self._depth == 0 and torch.is_grad_enabled() and module.training and _has_parameters(module):
            self._note_root(module)
            self._rows += row_hashes(args, kwargs)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def note_output(self, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            self._dtypes.add(str(output.dtype).removeprefix("torch."))

    @contextmanager
    def backward(self, tensors: Any) -> Iterator[None]:
        """Around `torch.autograd.backward`; scalar roots are losses."""
        if self._depth == 0 and not self.is_backward:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            values = [_full(root).item() if root.numel() == 1 else None for root in roots]
            known = [value for value in values if value is not None]
            self._noted.clear()  # a clip between micro-batches saw partial gradients
            self._loss = None if self._loss is None or len(known) < len(values) else self._loss + sum(known)
        outer, self.is_backward = self.is_backward, True
        try:
            yield
        finally:
            self.is_backward = outer

    def note_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record full gradients, once per parameter and step, then round them otherwise if asked."""
        self._name_parameters()
        for parameter in parameters:
            if id(parameter) in self._noted or parameter.grad is None:
                continue
            self._noted.add(id(parameter))
            name = self._names.get(id(parameter)) or f"parameter{len(self._names)}"
            self._names[id(parameter)] = name
            self._note_gradient(name, parameter)

    def before_step(self, optimizer: Optimizer) -> None:
        self._step_depth += 1
        if self._step_depth > 1:  # of an optimizer inside another
            return
        if id(optimizer) not in self._counts:
            self._counts[id(optimizer)] = 0
            self._optimizers.append(optimizer)
        count = self._counts[id(optimizer)]
        if count >= self._steps:  # another optimizer steps less often
            self.finish()
            raise SystemExit(0)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.note_gradients(parameters)
        if count == 0:
            self._note_weights(parameters, self.trace.initial_digests, self._initial)
        if self._is_first(optimizer):
            self.trace.rates.append(float(optimizer.param_groups[0].get("lr", 0.0)))

    def after_step(self, optimizer: Optimizer) -> None:
        self._step_depth -= 1
        if self._step_depth:
            return
        self._counts[id(optimizer)] += 1
        self._noted -= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if self._is_first(optimizer):
            self.trace.losses.append(self._loss)
            self.trace.rows.append(self._rows)
            self._loss, self._rows = 0.0, []
        if all(count >= self._steps for count in self._counts.values()):
            self.finish()
            raise SystemExit(0)

    def finish(self) -> None:
        """Write the files; nothing if the script made no step."""
        if self._is_written or not any(self._counts.values()):
            return
        self._is_written = True
        parameters = [
            parameter for each in self._optimizers for group in each.param_groups for parameter in group["params"]
        ]
        try:
            self._note_weights(parameters, self.trace.last_digests, self._weights)
        except (RuntimeError, ValueError):  # the script has ended its process group: shards cannot be gathered
            self.trace.last_digests, self._weights = {}, {}
        self.trace.dtypes = sorted(self._dtypes)
        self.trace.uses_accelerate = _uses_accelerate()
        write_trace(self._folder, self.trace, gradients=self._gradients, initial=self._initial, weights=self._weights)

    def _is_first(self, optimizer: Optimizer) -> bool:
        return optimizer is self._optimizers[0]

    def _note_root(self, module: nn.Module) -> None:
        if isinstance(module, FullyShardedDataParallel):
            raise NotBuiltError(
                "the script wraps its model in FullyShardedDataParallel, whose gradients are slices of flat parameters",
                hint="use fully_shard (FSDP2), whose parameters are DTensors",
            )
        if any(module is root for root in self._roots):
            return
        self._roots.append(module)
        modules = list(module.modules())
        self.trace.has_batch_norm |= any(
            isinstance(each, _BatchNorm) and not isinstance(each, SyncBatchNorm) for each in modules
        )
        is_sharded = any(isinstance(each, FSDPModule) for each in modules)
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                self.trace.is_replicated = False
                axes = sum(isinstance(placement, Shard) for placement in parameter.placements)
                self.trace.is_tensor_parallel |= axes > 1 or not is_sharded
            self._dtypes.add(str(parameter.dtype).removeprefix("torch."))

    def _name_parameters(self) -> None:
        for number, root in enumerate(self._roots):
            prefix = f"root{number + 1}." if number else ""
            for name, parameter in _unwrapped(root).named_parameters():
                short = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
                self._names.setdefault(id(parameter), prefix + short)

    def _note_gradient(self, name: str, parameter: torch.Tensor) -> None:
        step = self._step_of(parameter)
        while len(self.trace.gradient_norms) <= step:
            self.trace.gradient_norms.append({})
            self.trace.gradient_digests.append({})
        assert parameter.grad is not None
        full = _full(parameter.grad)
        self.trace.gradient_digests[step][name] = digest_of(full)
        if self._perturbed:
            _round_otherwise(parameter.grad, self._dtypes, seed=step * 100_003 + len(self._noted))
            full = _full(parameter.grad)
        self.trace.gradient_norms[step][name] = float(full.double().norm())
        if step == 0 and (self.trace.rank == 0 or self.trace.is_replicated):
            self._gradients[name] = full.to("cpu", copy=True)

    def _step_of(self, parameter: torch.Tensor) -> int:
        for optimizer in self._optimizers:
            if any(each is parameter for group in optimizer.param_groups for each in group["params"]):
                return self._counts[id(optimizer)]
        return 0  # clipped before the first step

    def _note_weights(self, parameters: Sequence[torch.Tensor], digests: dict[str, str], kept: Tensors) -> None:
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is not None:
                full = _full(parameter)
                digests[name] = digest_of(full)
                if self.trace.rank == 0:
                    kept[name] = full.to("cpu", copy=True)


def _uses_accelerate() -> bool:
    """Whether the script made an Accelerator; transformers imports the package by itself."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(module, DistributedDataParallel | DataParallel):
        module = module.module
    return module


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard, dense; collective over the ranks of a DTensor."""
    value = tensor.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to_dense() if value.is_sparse else value


def _round_otherwise(gradient: torch.Tensor, dtypes: set[str], *, seed: int) -> None:
    """Add noise of one rounding of the coarsest dtype, of the element and of its tensor; zeros stay zeros."""
    value = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    value = value.coalesce().values() if value.is_sparse else value
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float32).to(value.device) * 2 - 1
    size = value.abs().float() + float(value.float().square().mean().sqrt() if value.numel() else 0.0)
    with torch.no_grad():
        value.add_((noise * size * coarsest(dtypes) * (value != 0)).to(value.dtype))


def coarsest(dtypes: set[str]) -> float:
    """The largest unit roundoff of the dtypes; float32's at least."""
    return max([UNIT_ROUNDOFF["float32"], *(UNIT_ROUNDOFF[name] for name in dtypes if name in UNIT_ROUNDOFF)])
