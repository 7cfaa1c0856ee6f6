"""`Routers`: all routers of an engine's model. Counts the load of experts, adds their losses, corrects their choice.

    forward       choices are counted at the experts' module, weights of those over its capacity are set to 0, the
                  losses are attached to the weights
    end of step   one sum over all ranks for all layers; then the biases move and the shares of the next step are set

Ranks with the same tokens (tensor parallelism without sequence parallel) count once. Every rank knows all layers' sums,
so biases and shares are the same bits everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.groups import sum_over
from weft.comm.observer import buffer_collectives
from weft.core import axes
from weft.core.errors import ModelError, NotBuiltError
from weft.core.run_spec import RouterSpec
from weft.engine.axis import Axes
from weft.engine.measure.host_copy import HostCopy
from weft.engine.objective import Batch
from weft.engine.router.balance import attach, attach_late, probabilities, squared_log_sums
from weft.engine.router.bias import move_bias
from weft.engine.router.capacity import drop
from weft.engine.router.counted import count_in_class
from weft.engine.router.sums import add_choices, add_scores, choices_of, row_size
from weft.engine.router.totals import RouterTotals
from weft.engine.router.wide import widen
from weft.engine.wrap_forward import Forward, is_wrapped, wrap_forward
from weft.models.ep.layout import ExpertLayer, ExpertLayout
from weft.models.ep.routers import Router, RouterLayout


class Routers:
    """`found` has the routers if losses or biases need them, and is empty else."""

    def __init__(
        self,
        model: nn.Module,
        experts: ExpertLayout,
        found: RouterLayout,
        spec: RouterSpec,
        *,
        is_wide: bool,
        device: torch.device,
    ) -> None:
        """`is_wide`: routers compute in float32, and the rest in 16 bits."""
        self.spec, self.experts, self.model = spec, experts, model
        self.found, self._is_wide = found, is_wide
        self._sizes = [row_size(layer.num_experts) for layer in experts.layers]
        self._sums = torch.zeros(sum(self._sizes), dtype=torch.float64, device=device)
        self._scale = torch.zeros((), dtype=torch.float64, device=device)  # of the losses' gradients, in this step
        self._num_tokens = torch.ones((), dtype=torch.float64, device=device)
        self._is_counting = True
        most = max((layer.num_experts for layer in experts.layers), default=0)
        self._pooled = torch.zeros(most + 1, dtype=torch.float64, device=device)  # of a micro-batch, over all layers
        self._layers = [
            _RoutedLayer(layer, found.routers.get(layer.name), spec, row, self._scale, self._pooled)
            for layer, row in zip(experts.layers, self._rows(self._sums), strict=True)
        ]
        for routed in self._layers:
            routed.num_layers = len(self._layers)

    @property
    def biases(self) -> dict[str, str]:
        """The vectors that this engine moves: name to module of experts."""
        found = self.found.routers.values() if self.spec.bias_rate else ()
        return {router.bias: router.experts for router in found if router.bias}

    @property
    def places(self) -> dict[str, int | None]:
        """Modules of the routers that were found, and the place of the logits in their outputs."""
        return {router.name: router.output for router in self.found.routers.values()}

    def wrap(self) -> None:
        """Add the outermost layers of routers and modules of experts."""
        for router in self.found.routers.values() if self._is_wide else ():
            widen(self.model, router)
        for routed in self._layers:
            routed.wrap(self.model)

    def count_on(self, contexts: Axes) -> None:
        """Count on one of the ranks that have the same tokens; ranks of cp have different ones."""
        others = [context for context in contexts if context.axis not in (axes.PP, axes.TP, axes.CP)]
        tensor = [context for context in contexts if context.axis == axes.TP]
        is_stream = any(getattr(context.activation_layout, "sequence_parallel", False) for context in tensor)
        self._is_counting = all(context.owns_weight for context in [*others, *([] if is_stream else tensor)])

    # --- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, num_tokens: Tensor, *, sequence_length: int, loss_scale: float) -> None:
        """`num_tokens`: of the global batch."""
        for routed in self._layers:
            routed.sequence_length = sequence_length
        self._num_tokens.copy_(num_tokens)
        self._scale.copy_(loss_scale / num_tokens.clamp(min=1).double())

    def begin_microbatch(self) -> None:
        """Before its forward; no other micro-batch is in flight where the pooled choices are read."""
        if self.spec.balance_over == "transformers":
            self._pooled.zero_()

    @torch.no_grad()
    def finish_step(self, *, is_skipped: bool) -> RouterTotals | None:
        """Collective. Returns the sums over all ranks, which may still be on the device; None without layers."""
        if not self._layers:
            return None
        total = self._sums.clone() if self._is_counting else torch.zeros_like(self._sums)
        self._sums.zero_()
        with buffer_collectives():
            sum_over(total, None)
        has_next_shares = self._has_next_shares
        for routed, row in zip(self._layers, self._rows(total), strict=True):
            choices = choices_of(row, routed.num_experts)
            if has_next_shares:
                routed.set_shares(choices)
            if routed.router is not None and routed.router.bias and self.spec.bias_rate and not is_skipped:
                move_bias(self.model, routed.router.bias, choices, rate=self.spec.bias_rate)
        # clone: the next step may begin before the figures are read
        values, routed_tokens = HostCopy(total), HostCopy(self._num_tokens.clone())
        return RouterTotals(layers=self.experts.layers, spec=self.spec, values=values, num_tokens=routed_tokens)

    @property
    def _has_next_shares(self) -> bool:
        """Whether the next step's loss reads the choices of this one."""
        return self.spec.balance_loss > 0 and self.spec.balance_over == "batch"

    def _rows(self, flat: Tensor) -> list[Tensor]:
        return list(torch.split(flat, self._sizes))

    # --- state --------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, list[int]]:
        """The choices of the last step, which the next step's balancing loss reads."""
        if not self._has_next_shares:
            return {}
        return {routed.name: routed.choices.long().tolist() for routed in self._layers}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        for routed in self._layers:
            known = scalars.get(routed.name)
            if known is not None and len(known) == routed.num_experts:
                routed.set_shares(torch.tensor(known, dtype=torch.float64, device=self._sums.device))


class _RoutedLayer:
    """The layers around one module of experts and its router."""

    def __init__(
        self, layer: ExpertLayer, router: Router | None, spec: RouterSpec, row: Tensor, scale: Tensor, pooled: Tensor
    ) -> None:
        self.name, self.num_experts, self.router = layer.name, layer.num_experts, router
        self._spec, self._row, self._scale, self._pooled = spec, row, scale, pooled
        self.choices = row.new_zeros(layer.num_experts)
        self._shares = row.new_full((layer.num_experts,), 1.0 / layer.num_experts)  # f, of the last step
        self._has_loss = router is not None and spec.has_losses
        self.sequence_length = 1  # of this step
        self.num_layers = 1  # whose choices are pooled
        self._logits: Tensor | None = None

    def wrap(self, model: nn.Module) -> None:
        self._experts = model.get_submodule(self.name)
        if not self._has_loss and not self._spec.capacity_factor and not is_wrapped(self._experts):
            count_in_class(self._experts, self._row, self.num_experts)
            return
        self._names = list(inspect.signature(type(self._experts).forward).parameters)[1:]
        if self._has_loss and self.router is not None:
            wrap_forward(model.get_submodule(self.router.name), self._keep_logits)
        wrap_forward(self._experts, self._route)

    def set_shares(self, choices: Tensor) -> None:
        """A step without any choice leaves them uniform."""
        self.choices.copy_(choices)
        total = choices.sum()
        uniform = torch.full_like(self._shares, 1.0 / self.num_experts)
        self._shares.copy_(torch.where(total > 0, choices / total.clamp(min=1), uniform))

    def _keep_logits(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        place = self.router.output if self.router is not None else None
        logits = output if place is None else output[place]
        self._logits = logits.reshape(-1, self.num_experts)
        return output

    def _route(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        logits, self._logits = self._logits, None
        if not self._experts.training:
            return forward(*args, **kwargs)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        index, weights = given[self._names[1]], given[self._names[2]]
        add_choices(self._row, index, self.num_experts)
        if self._spec.capacity_factor:
            weights = drop(
                weights,
                index,
                self._row,
                factor=self._spec.capacity_factor,
                sequence_length=self.sequence_length,
                num_experts=self.num_experts,
            )
        given[self._names[2]] = weights if logits is None else self._with_losses(logits, index, weights)
        first = [given.pop(name) for name in self._names[:3]]
        return forward(*first, **given)

    def _with_losses(self, logits: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        shown = probabilities(logits, self.router.scoring).sum(0)  # type: ignore[union-attr]
        squares = squared_log_sums(logits).sum()
        add_scores(self._row, torch.cat([shown, squares[None]]), self.num_experts)
        if self._spec.balance_over == "transformers":
            weights = attach(weights, self._spec.z_loss * squares, self._scale)
            return self._with_pooled_loss(shown, index, weights)
        shares = self._shares if self._spec.balance_over == "batch" else self._shares_of(index)
        balance = (shares.to(shown.dtype) * shown).sum() * self.num_experts
        return attach(weights, self._spec.balance_loss * balance + self._spec.z_loss * squares, self._scale)

    def _with_pooled_loss(self, shown: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The loss of all layers at once, whose choices are complete in the backward."""
        add_choices(self._pooled, index, self.num_experts)
        rows = len(index) * self.num_layers
        factor = self._spec.balance_loss * self.num_experts / (rows * self.num_layers)
        return attach_late(weights, shown, lambda: self._pooled[: self.num_experts] * (factor * self._scale))

    def _shares_of(self, index: Tensor) -> Tensor:
        chosen = index.detach().reshape(-1).clamp(max=self.num_experts)
        counts = self._row.new_zeros(self.num_experts + 1)
        counts = counts.scatter_add(0, chosen, counts.new_ones(()).expand(chosen.shape))[: self.num_experts]
        return counts / counts.sum().clamp(min=1)


def tokens_of(batch: Batch) -> Tensor:
    """Tokens that routers see, padding included: one sequence per row."""
    return batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()))


def require_routers(experts: ExpertLayout, found: RouterLayout, spec: RouterSpec, *, model_name: str) -> None:
    """Refuse keys of [router] that do not apply to the model: they would be ignored silently."""
    if not spec.is_active:
        return
    if not experts.layers:
        reason = next(iter(experts.declined.values()), "it has no experts")
        raise ModelError(f"[router] does not apply to {model_name}: {reason}", hint="leave [router] out of run.toml")
    if spec.capacity_factor and experts.declined:
        name, reason = next(iter(experts.declined.items()))
        raise NotBuiltError(f"{name} has no capacity: {reason}", hint="set router.capacity_factor to 0")
    if spec.has_losses and found.declined:
        name, reason = next(iter(found.declined.items()))
        raise NotBuiltError(
            f"the router's logits of {name} were not found: {reason}",
            hint="set router.balance_loss and router.z_loss to 0; the load of experts is shown all the same",
        )
    if spec.balance_loss and spec.balance_over == "transformers":
        sizes = {layer.num_experts for layer in experts.layers}
        if len(sizes) > 1 or any(router.scoring != "softmax" for router in found.routers.values()):
            raise ModelError(
                f"transformers' router loss is of softmax scores over equal numbers of experts, and {model_name} has "
                "others",
                hint="use router.balance_over = 'batch'",
            )
    if spec.bias_rate and not any(router.bias for router in found.routers.values()):
        raise ModelError(
            f"the routers of {model_name} have no bias that corrects the choice of experts",
            hint="set router.bias_rate to 0, and use router.balance_loss",
        )
