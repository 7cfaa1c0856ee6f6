"""Whether a model's rows can be divided by position. Its own forward answers, no list of families.

A small model with the same structure runs with an attention that mixes no positions: each has its own value. Then one
token is changed. A position that changes elsewhere was reached by something other than attention (a convolution, a
recurrence, attention of the model's own), and parts of a row would be wrong. Further questions: do masks depend on
tokens; does the model use the positions that it is given; are those that it counts by itself 0, 1, 2, …; does attention
get one key of each position, in longer rows too (keys compressed of 128 positions show in no shorter row)?
"""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # no public form; a dry run's tensors have no values

from weft.models.build import constructed_value, parameters_on_meta
from weft.models.small_config import depth_overrides, width_factor, width_overrides

_NAME = "weft_probe"
_LENGTH, _CHANGED = 16, 9
_LONG = 512
_DIFFERENCE = 1e-5  # above rounding: products over other rows may round otherwise, some in float32
FAILURES = (AttributeError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AssertionError)


def why_not_divided(model: nn.Module) -> str:
    """Why rows of `model` cannot be divided; "" if they can."""
    return _answer(Asked.of(model))


@dataclass(frozen=True)
class Asked:
    """A model by its class and config; equal ones have one answer."""

    key: str
    model_class: type[nn.Module] = field(compare=False)
    config: Any = field(compare=False)

    @staticmethod
    def of(model: nn.Module) -> Asked:
        config: Any = model.config
        key = json.dumps(config.to_dict(), sort_keys=True, default=str)
        return Asked(f"{type(model).__module__}.{type(model).__qualname__} {key}", type(model), config)


@functools.lru_cache(maxsize=64)
def _answer(asked: Asked) -> str:
    try:
        with _disable_current_modes():
            return _ProbedModel(small_model(asked.model_class, asked.config)).why_not()
    except FAILURES as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"its forward could not be probed: {lines[0][:160]}"


def small_model(model_class: type[nn.Module], given: Any) -> nn.Module:
    """The same structure with few narrow layers, and values, in float64."""
    config = copy.deepcopy(given)
    text = config.get_text_config()
    overrides = depth_overrides(text, least=2)
    factor = width_factor(text, tp=1)
    while True:
        try:
            return _with_values(model_class, config, {**overrides, **width_overrides(text, factor, tp=1, ep=1)})
        except FAILURES:
            if factor <= 1:
                raise
            factor //= 2


def _with_values(model_class: type[nn.Module], given: Any, overrides: Mapping[str, Any]) -> nn.Module:
    config = copy.deepcopy(given)
    for key, value in overrides.items():
        setattr(config.get_text_config(), key, value)
    config._attn_implementation_internal = "eager"
    with torch.random.fork_rng(devices=[]), parameters_on_meta(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = model_class(config)
    built: Any = model
    built.tie_weights()
    _fill(model)
    if hasattr(built, "set_experts_implementation"):
        built.set_experts_implementation("eager")
    return model.double().eval()


def _fill(model: nn.Module) -> None:
    generator, made = torch.Generator().manual_seed(0), dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                base = constructed_value(parameter)
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                value = noise if base is None else base.float() + noise
                made[id(parameter)] = nn.Parameter(value, requires_grad=False)
            module._parameters[name] = made[id(parameter)]


class _ProbedModel:
    """Forwards of one small model, and what they show."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masks: list[Tensor] = []
        self.calls = 0
        self.compresses = ""  # the first module whose attention has other keys than one of each position

    def why_not(self) -> str:
        ids = torch.randint(3, 60, (2, _LENGTH), generator=torch.Generator().manual_seed(1))
        changed = ids.clone()
        changed[:, _CHANGED] = (changed[:, _CHANGED] - 2) % 50 + 5
        positions = torch.arange(_LENGTH).expand(2, -1)
        with torch.no_grad(), replaced_attention(self.model, self._own_value, masks="sdpa"):
            if reason := self._keys_reason():
                return reason
            try:
                first, seen = self._forward(ids, positions)
            except TypeError as error:
                if "position_ids" not in str(error):
                    raise
                return "its forward takes no position_ids, and a part of a row would count from 0"
            masks, self.masks = self.masks, []
            second, seen_again = self._forward(changed, positions)
            if self.calls == 0:
                return "its attention does not go through the attention interface of transformers"
            if reason := self._mixer(first, second, seen, seen_again):
                return reason
            if not _are_equal(masks, self.masks):
                return "what attention may see depends on the tokens, and a rank has a part of them"
            return self._positions_reason(ids, positions, first)

    def _mixer(self, first: Tensor, second: Tensor, seen: Mapping[str, Any], again: Mapping[str, Any]) -> str:
        if not _moved_elsewhere(first, second):
            return ""
        for name, out in seen.items():  # inner modules finish first
            twin = again.get(name)
            is_stream = isinstance(out, Tensor) and out.ndim >= 3 and out.shape[1] == _LENGTH
            if name and is_stream and isinstance(twin, Tensor) and _moved_elsewhere(out, twin):
                return f"{name} ({type(self.model.get_submodule(name)).__name__}) mixes positions outside of attention"
        return "something outside of attention mixes positions"

    def _keys_reason(self) -> str:
        """Whether each position has one key, in the longest rows that the model takes."""
        length = _LONG
        while not self.compresses and length > _LENGTH:
            try:
                self.model(input_ids=torch.full((1, length), 5), use_cache=False)
                break
            except FAILURES:  # a table of fewer positions
                length //= 2
        self.masks = []
        if not self.compresses:
            return ""
        kind = type(self.model.get_submodule(self.compresses)).__name__
        return f"{self.compresses} ({kind}) attends to keys of several positions each, and a rank has a part of them"

    def _positions_reason(self, ids: Tensor, positions: Tensor, first: Tensor) -> str:
        """Whether a part of a row has the positions that it is given."""
        plain, _ = self._forward(ids, None)
        rolled, _ = self._forward(ids.roll(1, 1), None)
        if not _differ(rolled[:, 1:], plain[:, :-1]).any():
            return ""  # it knows no positions outside of attention
        jumped, _ = self._forward(ids, (positions * 3 + 7) % _LENGTH)
        if not _differ(jumped, first).any():
            return "it does not read the position_ids that it takes, and a part of a row would count from 0"
        if _differ(plain, first).any():
            return "by itself it counts positions otherwise than 0, 1, 2, …"
        return ""

    def _forward(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        seen: dict[str, Any] = {}
        handles = []
        for name, module in self.model.named_modules():

            def look(_module: nn.Module, _args: Any, out: Any, name: str = name) -> None:
                seen.setdefault(name, _first_tensor(out))

            handles.append(module.register_forward_hook(look))
        given = {"position_ids": positions} if positions is not None else {}
        try:
            logits: Tensor = self.model(input_ids=ids, use_cache=False, **given).logits
        finally:
            for handle in handles:
                handle.remove()
        if not logits.isfinite().all():  # nothing differs from a NaN
            raise ValueError("its small model has logits that are not finite")
        return logits, seen

    def _own_value(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kwargs: Any
    ) -> Any:
        self.calls += 1
        if key.shape[2] != query.shape[2] and not self.compresses:
            self.compresses = next(name for name, each in self.model.named_modules() if each is module)
        value = value[:, :, : query.shape[2]]
        self.masks += [each.clone() for each in (mask, *kwargs.values()) if isinstance(each, Tensor)]
        groups = query.shape[1] // value.shape[1]
        out = value.repeat_interleave(groups, 1) + query.mean(-1, keepdim=True)  # rotary positions show in queries
        return out.transpose(1, 2).contiguous(), None


@contextmanager
def replaced_attention(
    model: nn.Module, attend: Callable[..., Any], *, masks: str | Callable[..., Any]
) -> Iterator[None]:
    """Inside, `model` calls `attend`, with the masks of a function, or of the implementation of a name. For a model of
    one use: it keeps the name of the implementation."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[masks] if isinstance(masks, str) else masks)
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config"))}
    for config in configs.values():
        config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME, None)


def _first_tensor(out: Any) -> Tensor | None:
    if isinstance(out, Tensor) or out is None:
        return out
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def _differ(first: Tensor, second: Tensor) -> Tensor:
    if not first.is_floating_point():
        return first != second
    return (first - second).abs() > _DIFFERENCE * first.abs().max()


def _moved_elsewhere(first: Tensor, second: Tensor) -> bool:
    moved = _differ(first, second).flatten(2).any(-1).any(0)
    moved[_CHANGED] = False
    return bool(moved.any())


def _are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        one.shape == two.shape and torch.equal(one, two) for one, two in zip(first, second, strict=True)
    )
