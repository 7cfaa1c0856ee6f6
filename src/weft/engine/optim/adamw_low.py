"""AdamW with moments, and optionally weights, in bfloat16; on a GPU also with all of it in float32.

The float32 form is torch's fused update with clipping inside: one pass less over the gradients, at memory bandwidth.

State has torch's names (`exp_avg`, `exp_avg_sq`, `step`), so checkpoints are those of any AdamW. Rounding follows from
the run's seed, a parameter's name, its step and the element's index in the full tensor: every layout rounds alike, and
a resumed run has the bits of the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.core.errors import BadValueError
from weft.core.precision import PrecisionPolicy
from weft.engine.kernels.triton_here import has_triton
from weft.engine.optim.adamw_low_update import adamw_low_
from weft.engine.optim.element_spans import ElementSpan, spans_of
from weft.engine.optim.rounding_bits import key_of
from weft.engine.ownership import LocalShards, chunks_of, local
from weft.engine.precision import torch_dtype

LARGE_ELEMENTS = 2**20  # per tensor, on average


@dataclass(frozen=True, kw_only=True)
class Place:
    """The inputs of a parameter's rounding, beside the step."""

    key: int
    spans: tuple[ElementSpan, ...]


@dataclass(frozen=True, kw_only=True)
class LowStates:
    """The dtypes of the moments, and every parameter's place; `rounds`: not all of it is float32."""

    first: torch.dtype
    second: torch.dtype
    places: Mapping[nn.Parameter, Place]
    rounds: bool = True

    @staticmethod
    def of(
        parameters: Mapping[str, nn.Parameter],
        policy: PrecisionPolicy,
        *,
        seed: int,
        shards: LocalShards,
        copies: Mapping[str, str],
        at_rest: torch.dtype = torch.float32,
    ) -> LowStates | None:
        """None if the policy keeps all of it in float32, unless this is faster there too. `copies`: names of tied
        weights that another stage also holds and must round alike. `at_rest`: the dtype of parameters, whose masters
        may be elsewhere."""
        is_low = policy.has_low_states or policy.has_own_gradients
        if not is_low and not _pays(list(parameters.values()), at_rest):
            return None
        return LowStates(
            first=torch_dtype(policy.first_moment),
            second=torch_dtype(policy.second_moment),
            rounds=is_low,
            places={
                parameter: place_of(parameter, name=copies.get(name, name), seed=seed, shards=shards, here=name)
                for name, parameter in parameters.items()
            },
        )


def _pays(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> bool:
    """On a GPU with large tensors: it launches one kernel per tensor, torch's one for many."""
    shards = [local(parameter.detach()) for parameter in parameters]
    is_fit = all(shard.is_cuda and shard.dtype == dtype and shard.is_contiguous() for shard in shards)
    return is_fit and has_triton() and sum(shard.numel() for shard in shards) >= LARGE_ELEMENTS * len(shards) > 0


def place_of(parameter: nn.Parameter, *, name: str, seed: int, shards: LocalShards, here: str) -> Place:
    if not local(parameter).is_contiguous():
        raise BadValueError(
            f"{here} is not contiguous, which bfloat16 states and weights require",
            hint="call .contiguous() on it, or use precision.optimizer_state = 'float32'",
        )
    shard = shards.get(here)
    shape = shard.shape if shard is not None else tuple(parameter.shape)
    return Place(key=key_of(seed, name), spans=tuple(spans_of(chunks_of(parameter, shard), shape)))


class AdamWLow(Optimizer):
    """See the module. `gradient_factor`, a 0-dim tensor, multiplies the gradients of the next step as they are read."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        states: LowStates,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.states = states
        self.rounds = states.rounds
        self.gradient_factor: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("AdamWLow takes no closure")
        factor, self.gradient_factor = self.gradient_factor, None
        for group in self.param_groups:
            self._update([parameter for parameter in group["params"] if parameter.grad is not None], group, factor)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], factor: Tensor | None) -> None:
        tensors: list[list[Tensor]] = [[], [], [], []]
        steps, keys, firsts, row_steps = [], [], [], []
        for parameter in parameters:
            state, place = self._state_of(parameter), self.states.places[parameter]
            state["step"] += 1
            inputs = [parameter, _contiguous_gradient(parameter), state["exp_avg"], state["exp_avg_sq"]]
            for span in place.spans:
                for views, tensor in zip(tensors, inputs, strict=True):
                    views.append(span.of(local(tensor.detach())))
                steps.append(state["step"])
                keys.append(place.key)
                firsts.append(span.first)
                row_steps.append(span.row_step)
        if steps:
            beta1, beta2 = group["betas"]
            adamw_low_(
                *tensors, steps, factor, keys, firsts, row_steps,
                float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"],
            )  # fmt: skip

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.states.first)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.states.second)
        return state


def _contiguous_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("the parameter has no gradient")
    return parameter.grad if local(parameter.grad).is_contiguous() else parameter.grad.contiguous()
