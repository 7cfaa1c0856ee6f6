"""Finds the routers of a model by what they do: a copy of a block of experts runs on random tokens.

    logits     the tensor [tokens, experts] in a router's output whose softmax or sigmoid, at the chosen experts, is in
               the ratio of the weights that the experts get
    bias       a vector of one number per expert that changes the choice, and neither logits nor weights

No list of families. A block whose logits are not found is declined with a reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.core.errors import first_line
from weft.models.ep.layout import ExpertLayer, ExpertLayout
from weft.models.seeds import seed_generators

Scoring = Literal["softmax", "sigmoid"]
_TOKENS, _WIDTHS = 48, ("hidden_size", "n_embd", "d_model", "hidden_dim")
_CLOSE = 1e-4  # the ratio of a token's weights to its scores, relative: float32
_FIRST_LIFT = 100.0  # of a bias: more than the distance of any two scores


@dataclass(frozen=True, kw_only=True)
class Router:
    """The router of one module of experts."""

    name: str  # of the module that computes the logits
    experts: str  # of the module of experts
    output: int | None  # place of the logits in its output; None if the output is the logits
    scoring: Scoring
    bias: str | None = None  # full name of the vector that corrects the choice
    weights_follow: bool = True  # whether the experts' weights have the dtype of the hidden states


@dataclass(frozen=True, kw_only=True)
class RouterLayout:
    routers: dict[str, Router]  # by module of experts
    declined: dict[str, str] = field(default_factory=dict)


class _NotFoundError(Exception):
    """A block whose logits were not found; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class _Routing:
    """What one forward has chosen."""

    index: Tensor
    weights: Tensor
    outputs: dict[str, Any]  # of the candidates, by name in the block


def find_routers(model: nn.Module, experts: ExpertLayout) -> RouterLayout:
    """The router of each module of experts; alike blocks are probed once."""
    routers: dict[str, Router] = {}
    declined: dict[str, str] = {}
    known: dict[Any, Router | str] = {}
    for layer in experts.layers:
        block_name, _, own = layer.name.rpartition(".")
        block = model.get_submodule(block_name)
        shapes = tuple((name, tuple(value.shape)) for name, value in block.named_parameters())
        key = (type(block), own, shapes)
        if key not in known:
            known[key] = _probed(model, block, own, layer)
        found = known[key]
        if isinstance(found, str):
            declined[layer.name] = found
        else:
            bias = None if found.bias is None else _join(block_name, found.bias)
            routers[layer.name] = Router(
                name=_join(block_name, found.name),
                experts=layer.name,
                output=found.output,
                scoring=found.scoring,
                bias=bias,
                weights_follow=found.weights_follow,
            )
    return RouterLayout(routers=routers, declined=declined)


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _probed(model: nn.Module, block: nn.Module, own: str, layer: ExpertLayer) -> Router | str:
    """The router by its names in the block, or the reason why there is none."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            seed_generators(0)
            return _RouterProbe(model, block, own, layer.num_experts).router()
    except _NotFoundError as reason:
        return str(reason)


class _RouterProbe:
    """A copy of a block with values, whose experts record their arguments."""

    def __init__(self, model: nn.Module, block: nn.Module, own: str, num_experts: int) -> None:
        self.num_experts = num_experts
        self.candidates = [
            name
            for name, child in block.named_children()
            if name != own and any(value.shape[:1] == (num_experts,) for value in child.parameters())
        ]
        if not self.candidates:
            raise _NotFoundError("no module beside the experts has one row per expert")
        self.recorder = _ExpertsStub()
        self.copy = _copy_with_values(block, keep=self.candidates, replaced={own: self.recorder})
        self.hidden = torch.randn(1, _TOKENS, _width(model))

    def router(self) -> Router:
        found = self._run()
        for name, output in found.outputs.items():
            tensors = [output] if isinstance(output, Tensor) else list(output)
            for place, value in enumerate(tensors):
                scoring = self._scoring(value, found) if isinstance(value, Tensor) else None
                if scoring is not None:
                    at = None if isinstance(output, Tensor) else place
                    bias, follow = self._bias(found), self._weights_follow()
                    return Router(name=name, experts="", output=at, scoring=scoring, bias=bias, weights_follow=follow)
        raise _NotFoundError("no output of its router has softmax or sigmoid scores in the ratio of the weights")

    def _run(self) -> _Routing:
        outputs: dict[str, Any] = {}

        def keep(name: str) -> Any:
            return lambda _module, _args, output: outputs.__setitem__(name, output)

        handles = [self.copy.get_submodule(name).register_forward_hook(keep(name)) for name in self.candidates]
        try:
            self.copy(self.hidden.clone())
        except Exception as error:  # model code of any family, called with one argument
            why = f"{type(error).__name__}: {first_line(error)}"
            raise _NotFoundError(f"its block does not run on hidden states alone ({why})") from None
        finally:
            for handle in handles:
                handle.remove()
        if self.recorder.given is None:
            raise _NotFoundError("its block did not call the experts")
        index, weights = self.recorder.given
        if index.ndim != 2 or index.is_floating_point() or weights.shape != index.shape:
            raise _NotFoundError("its experts are not called with [tokens, experts per token]")
        return _Routing(index=index, weights=weights.float(), outputs=outputs)

    def _scoring(self, value: Tensor, found: _Routing) -> Scoring | None:
        if not value.is_floating_point() or value.numel() != _TOKENS * self.num_experts:
            return None
        logits = value.reshape(_TOKENS, self.num_experts).float()
        for scoring in ("softmax", "sigmoid"):
            scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
            ratios = found.weights / scores.gather(1, found.index)
            if found.index.shape[1] == 1 and not _is_constant(found.weights.T):
                ratios = ratios.T  # one expert per token: tokens are compared, unless all weights are normalised to one
            if _is_constant(ratios):
                return scoring
        return None

    def _weights_follow(self) -> bool:
        self.copy, self.hidden = self.copy.bfloat16(), self.hidden.bfloat16()
        self._run()
        return self.recorder.given is not None and self.recorder.given[1].dtype == torch.bfloat16

    def _bias(self, before: _Routing) -> str | None:
        """The vector whose first element, when lifted, makes every token choose the first expert."""
        for name, tensor in _vectors(self.copy, self.num_experts):
            kept = tensor.clone()
            tensor.view(-1)[0] += _FIRST_LIFT
            try:
                after = self._run()
            finally:
                tensor.copy_(kept)
            is_chosen = bool((after.index == 0).any(dim=1).all())
            if is_chosen and all(_same(after.outputs[key], value) for key, value in _logits(before).items()):
                return name
        return None


def _logits(found: _Routing) -> dict[str, Any]:
    return {
        name: output if isinstance(output, Tensor) else output[0]
        for name, output in found.outputs.items()
        if isinstance(output, Tensor) or isinstance(output[0], Tensor)
    }


def _same(output: Any, logits: Tensor) -> bool:
    first = output if isinstance(output, Tensor) else output[0]
    return torch.equal(first, logits)


def _is_constant(ratios: Tensor) -> bool:
    """Whether each row has one number."""
    spread = ratios.amax(1) - ratios.amin(1)
    return bool(ratios.isfinite().all() and (spread <= _CLOSE * ratios.abs().amax(1)).all())


def _vectors(module: nn.Module, length: int) -> Iterator[tuple[str, Tensor]]:
    tensors: Mapping[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() == length and tensor.shape[-1] == length:
            yield name, tensor.data


def _width(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = next((getattr(config, key) for key in _WIDTHS if isinstance(getattr(config, key, None), int)), None)
    if width is None:
        raise _NotFoundError("the config has no hidden size")
    return int(width)


class _ExpertsStub(nn.Module):
    """In the place of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.given: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        index, weights = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][:2]
        self.given = (index, weights)
        return torch.zeros_like(hidden)


class _Same(nn.Module):
    """In the place of modules that do not route."""

    def forward(self, hidden: Any, *_args: Any, **_kwargs: Any) -> Any:
        return hidden


def _copy_with_values(block: nn.Module, *, keep: list[str], replaced: dict[str, nn.Module]) -> nn.Module:
    """A copy on the CPU in float32 with random values; children other than `keep` do nothing."""
    dropped = {name: child for name, child in block.named_children() if name not in keep}
    memo: dict[int, Any] = {id(child): replaced.get(name, _Same()) for name, child in dropped.items()}
    # experts are large: their copy must not be allocated
    without = {id(tensor) for child in dropped.values() for tensor in (*child.parameters(), *child.buffers())}
    for tensor in (*block.parameters(), *block.buffers()):
        if id(tensor) not in without and (tensor.is_floating_point() or tensor.device.type == "meta"):
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            value = torch.zeros(tensor.shape, dtype=dtype)
            if dtype == torch.float32:
                value.normal_(std=0.5 / max(1, *tensor.shape[-1:]) ** 0.5)
            memo[id(tensor)] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
    return copy.deepcopy(block, memo).train()
