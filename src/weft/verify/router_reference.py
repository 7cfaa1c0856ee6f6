"""The losses of routers and the bias of the choice in the reference, written out with autograd on the full batch.

It shares no code with the engine: routers are those that transformers itself declares to record (`router_logits`),
their scoring is read from their source, their bias has one of transformers' names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import NotBuiltError
from weft.core.run_spec import RouterSpec
from weft.verify.plain_experts import plain_experts

_BIASES = ("e_score_correction_bias", "expert_bias")


class RouterReference:
    """Hooks on the routers of a plain model. `terms` after each forward, `finish_step` after the update."""

    def __init__(self, model: nn.Module, spec: RouterSpec) -> None:
        self._spec = spec
        self._routers = (
            [_PlainRouter(router, place) for router, place in declared_routers(model)] if spec.reads_routers else []
        )
        owners = {id(value): name for name, value in (*model.named_parameters(), *model.named_buffers())}
        for plain in self._routers:
            plain.find_bias(model, owners)

    def terms(self, num_tokens: int) -> Tensor | float:
        """The losses of the forward that has just run, as its summand of the means over `num_tokens`."""
        total: Tensor | float = 0.0
        for router in self._routers:
            logits = router.take()
            if self._spec.has_losses:
                num_experts = logits.shape[-1]
                shares = torch.full_like(logits[0], 1 / num_experts) if router.shares is None else router.shares
                sums = router.probabilities(logits).sum(0) / num_tokens
                total = total + self._spec.balance_loss * num_experts * (shares.to(sums.dtype) * sums).sum()
                total = total + self._spec.z_loss * logits.logsumexp(-1).square().sum() / num_tokens
        return total

    @torch.no_grad()
    def finish_step(self, masters: Mapping[str, nn.Parameter], *, is_skipped: bool) -> dict[str, Tensor]:
        """Returns the loads that moved the biases, by name of the bias."""
        loads: dict[str, Tensor] = {}
        for router in self._routers:
            counts, router.counts = router.counts, None
            if counts is None:
                continue
            router.shares = counts / counts.sum()
            if self._spec.bias_rate and router.bias is not None and not is_skipped:
                move = self._spec.bias_rate * torch.sign(counts.mean() - counts)
                for value in (router.bias, masters.get(router.bias_name)):
                    if value is not None:
                        value.add_(move.to(value.dtype).view(value.shape))
                loads[router.bias_name] = counts.cpu()
        return loads

    def biases(self) -> dict[str, Tensor]:
        if not self._spec.bias_rate:
            return {}
        return {router.bias_name: router.bias for router in self._routers if router.bias is not None}


class _PlainRouter:
    def __init__(self, module: nn.Module, place: int) -> None:
        self._module, self._place = module, place
        self._is_sigmoid = "sigmoid" in inspect.getsource(type(module))
        self._output: Any = None
        self.shares: Tensor | None = None
        self.counts: Tensor | None = None
        self.bias: Tensor | None = None
        self.bias_name = ""
        module.register_forward_hook(self._keep)

    def find_bias(self, model: nn.Module, names: Mapping[int, str]) -> None:
        """In the router, or beside it."""
        around = [child for child in model.modules() if any(part is self._module for part in child.children())]
        for module in (*self._module.modules(), *around):
            for key, value in (*module._buffers.items(), *module._parameters.items()):
                if key in _BIASES and value is not None and self.bias is None:
                    self.bias, self.bias_name = value, names[id(value)]

    def probabilities(self, logits: Tensor) -> Tensor:
        if not self._is_sigmoid:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def take(self) -> Tensor:
        """The logits of the last forward; its choices are counted."""
        output, self._output = self._output, None
        logits: Tensor = output[self._place].flatten(0, -2)
        index = next(value for value in output if isinstance(value, Tensor) and not value.is_floating_point())
        counts = torch.bincount(index.flatten(), minlength=logits.shape[-1]).double()
        self.counts = counts if self.counts is None else self.counts + counts
        return logits if logits.dtype == torch.float64 else logits.float()

    def _keep(self, module: nn.Module, _args: Any, output: Any) -> None:
        if module.training:
            self._output = output


def declared_routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Modules whose output transformers records as `router_logits`, and the place of the logits in it."""
    found: dict[int, tuple[nn.Module, int]] = {}
    for owner in model.modules():
        declared = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in declared if isinstance(declared, list | tuple) else [declared]:
            kind, place = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
            for module in model.modules():
                if isinstance(kind, type) and isinstance(module, kind) and not isinstance(module, nn.Linear):
                    found.setdefault(id(module), (module, int(place)))
    return list(found.values())


def compute_in_float32(model: nn.Module) -> None:
    """Routers of a low-precision model: inputs and parameters in float32, weights of experts in their own dtype."""
    for router, place in declared_routers(model):
        router.forward = _WideForward(router, place)


class _WideForward:
    def __init__(self, router: nn.Module, place: int) -> None:
        self._router, self._place, self._own = router, place, router.forward

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            dtypes = [getattr(value, "dtype", None) for value in self._own(*args)]
        narrow = [(module, dict(module._parameters)) for module in self._router.modules()]
        try:
            for module, values in narrow:
                module._parameters.update({k: v.float() for k, v in values.items() if v is not None})  # type: ignore[misc]
            output = self._own(*(value.float() if isinstance(value, Tensor) else value for value in args))
        finally:
            for module, values in narrow:
                module._parameters.update(values)
        return tuple(
            value.to(dtype) if dtype is not None and place != self._place else value
            for place, (value, dtype) in enumerate(zip(output, dtypes, strict=True))
        )


def require_verifiable(model: nn.Module, spec: RouterSpec) -> None:
    """Refuse runs whose router losses have no reference."""
    if spec.reads_routers:
        require_declared(model)
    if spec.capacity_factor and not plain_experts(model):
        raise NotBuiltError(
            f"verify has no reference for the experts of {type(model).__name__}: none of its modules has them stacked",
            hint="verify with router.capacity_factor = 0",
        )


def is_declared(model: nn.Module) -> bool:
    """Whether the reference knows the routers of `model`; a dense model has none."""
    return not any(".experts." in name for name, _ in model.named_parameters()) or bool(declared_routers(model))


def require_declared(model: nn.Module) -> None:
    """Refuse mixtures whose routers the reference does not know."""
    if not is_declared(model):
        raise NotBuiltError(
            f"verify has no reference for the routers of {type(model).__name__}: transformers does not record them",
            hint="verify without [router] in run.toml and without precision.router in plan.toml",
        )
