"""Merged weights of a model with adapters: W + scale * B A, one tensor at a time, in the wider dtype of W and B.

The sum is made in float32; rounded to the bfloat16 of a base, it would lose small updates. Of a quantised base W has
the values of its codes. Frozen weights that a checkpoint leaves out come from their source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from weft.core.run_spec import RunSpec
from weft.models.adapter.build import run_skeleton
from weft.models.adapter.lora import adapted_linears, factor_names
from weft.models.adapter.quantised import quantised_linears, rounded
from weft.models.initial import WeightSource
from weft.models.tp.roles import linear_facts


def merged_tensors(
    run: RunSpec,
    config: object,
    base: WeightSource,
    given: Mapping[str, torch.Tensor],
    *,
    order: Callable[[list[str]], list[str]] = list,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the base model, with its adapter added, and the other tensors of `given`.

    `given`: factors and all else of a checkpoint; `base` has the rest. `order` sorts the names.
    """
    model = run_skeleton(run, config)
    kinds = {f"{name}.weight": module.base_kind for name, module in quantised_linears(model)}
    transposed = {name: _is_transposed(name, module) for name, module in adapted_linears(model)}
    factors = set(factor_names(model))
    missing = [name for name, _ in model.named_parameters() if name not in given]
    readers = dict(base.readers(missing))
    for name in order([*(name for name in given if name not in factors), *readers]):
        stored = readers[name](()) if name in readers else given[name]
        value = rounded(stored, kinds[name]) if name in kinds else stored
        merged = _merged(name, value, given, transposed, scale=run.adapter.scale)
        yield name, merged.to(torch.promote_types(stored.dtype, merged.dtype))


def _merged(
    name: str, value: torch.Tensor, given: Mapping[str, torch.Tensor], transposed: Mapping[str, bool], *, scale: float
) -> torch.Tensor:
    linear = name.removesuffix(".weight")
    if linear not in transposed or linear == name:
        return value.clone()
    of_output, of_input = given[f"{linear}.lora_B.weight"], given[f"{linear}.lora_A.weight"]
    delta = (of_output.float() @ of_input.float()) * scale
    merged = value.float() + (delta.T if transposed[linear] else delta)
    return merged.to(torch.promote_types(value.dtype, of_output.dtype))


def _is_transposed(name: str, module: object) -> bool:
    facts = linear_facts(name, module)  # type: ignore[arg-type]
    return facts is not None and facts.is_transposed
