"""AdamW with 8-bit moments (torchao's format and update) whose numbers do not depend on the layout.

torchao divides each rank's flattened shard into blocks of 256, so the blocks, and the run, depend on the number of
ranks. Here a block lies in the last dimension of the global parameter, which ZeRO never shards, and only the global
shape decides whether to quantise: no shard splits a block, and a checkpoint's codes and scales reshard exactly, without
requantising.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.optim import Optimizer

from weft.core.extras import missing_extra
from weft.engine.ownership import local

MIN_ELEMENTS = 4096  # smaller tensors gain nothing and hurt most
MIN_BLOCK, MAX_BLOCK = 64, 256
NUM_CODES = 256
CODES, SCALES = ".codes", ".scales"  # of a moment, as states and in checkpoints
PARTS = {CODES: torch.uint8, SCALES: torch.float32}
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def build_adamw8bit(
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    shapes: Mapping[torch.Tensor, torch.Size] | None = None,
) -> Optimizer:
    """`shapes`: the full shapes of parameters that axes other than ZeRO's shard."""
    try:
        import torchao.optim  # noqa: F401
    except ImportError:
        raise missing_extra("torchao") from None
    return RowwiseAdamW8bit(groups, lr=lr, betas=betas, eps=eps, shapes=shapes or {})


def block_size_for(shape: torch.Size) -> int | None:
    """Elements per block, a divisor of the last dimension; None if the moments stay float32."""
    if len(shape) < 2 or shape.numel() < MIN_ELEMENTS:
        return None
    block = MAX_BLOCK
    while block >= MIN_BLOCK:
        if shape[-1] % block == 0:
            return block
        block //= 2
    return None


class RowwiseAdamW8bit(Optimizer):
    """Holds state for this rank's rows: plain tensors, never DTensors."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        shapes: Mapping[torch.Tensor, torch.Size],
    ) -> None:
        self._shapes = shapes
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("RowwiseAdamW8bit takes no closure")
        for group in self.param_groups:
            rate = torch.tensor(float(group["lr"]))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, rate)

    def block_of(self, parameter: torch.Tensor) -> int | None:
        """Elements per block of a parameter; None if its moments stay float32."""
        return block_size_for(self._shapes.get(parameter, parameter.shape))

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], rate: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            block = self.block_of(parameter)
            state["exp_avg"] = _zeros(parameter, block, signed=True)
            state["exp_avg_sq"] = _zeros(parameter, block, signed=False)
        state["step"] += 1
        values = local(parameter.detach())
        if values.numel() == 0:
            return
        beta1, beta2 = group["betas"]
        _update_rule(values.device)(
            values, local(parameter.grad), state["step"], state["exp_avg"], state["exp_avg_sq"], None,  # type: ignore[arg-type]
            rate, beta1, beta2, group["weight_decay"], group["eps"], True, False,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QuantisedParts:
    """The two tensors of an 8-bit moment of this rank's rows."""

    codes: torch.Tensor  # uint8, the shard's shape
    scales: torch.Tensor  # float32, [..., blocks of the last dimension]


def quantised_parts(value: torch.Tensor) -> QuantisedParts | None:
    """The shards of an 8-bit moment, sharing its memory; None for any other tensor."""
    codes, scale = getattr(value, "codes", None), getattr(value, "scale", None)
    if not isinstance(codes, torch.Tensor) or not isinstance(scale, torch.Tensor):
        return None
    return QuantisedParts(codes=codes, scales=scale.view(*codes.shape[:-1], -1))


def joined(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state whose 8-bit moments are given as codes and scales, which the moments share; codes alone without rows."""
    found = {key: value for key, value in state.items() if not key.endswith((CODES, SCALES))}
    for key in (key.removesuffix(CODES) for key in state if key.endswith(CODES)):
        codes, scales = state[key + CODES], state[key + SCALES]
        found[key] = _moment(codes, scales, signed=_SIGNED[key]) if codes.numel() else codes
    return found


def _moment(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit(codes, scales, _code_values(codes.device, signed), signed, dtype=torch.float32)  # type: ignore[no-any-return]


def _code_values(device: torch.device, signed: bool) -> torch.Tensor:
    """The float of each code. A dry run has no values, and its tensors belong to that run."""
    from torchao.optim.quant_utils import create_dynamic_map

    key = (device, signed)
    if active_fake_mode() is not None:
        return torch.empty(NUM_CODES, device=device)
    if key not in _values:
        _values[key] = torch.tensor(create_dynamic_map(signed=signed), device=device)
    return _values[key]


_values: dict[tuple[torch.device, bool], torch.Tensor] = {}


def _zeros(parameter: torch.Tensor, block: int | None, *, signed: bool) -> torch.Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    values = local(parameter)
    if block is None or values.numel() == 0:
        dtype = torch.float32 if block is None else torch.uint8
        return torch.zeros_like(values, dtype=dtype)
    return OptimState8bit.zeros(values.shape, signed, block, values.device, dtype=values.dtype)  # type: ignore[no-any-return]


@functools.cache
def _update_rule(device: torch.device) -> Callable[..., None]:
    """torchao's update of one tensor; compiled on a GPU, plain on a CPU, which may have no compiler."""
    from torchao.optim.adam import single_param_adam  # not exported; tests/unit/engine/optim/test_adamw_8bit.py pins it

    if device.type != "cuda":
        return single_param_adam  # type: ignore[no-any-return]
    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    def update(*args: Any) -> None:
        # one compiled update per shape of the model: a fixed number, but often above the compiler's limit
        with torch._dynamo.utils.disable_cache_limit():
            compiled(*args)  # type: ignore[no-untyped-call]

    return update
