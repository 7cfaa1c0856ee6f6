"""The largest model of a family that a machine trains, for each way to offload: `weft plan --largest`.

Models are the family's in the zoo, by their parameters. The answer has two sizes:

    named    the largest of them with a plan that fits
    scaled   the next larger one with as many blocks as fit, or the largest one with more; if that has more parameters

A model fits if some plan does with every block recomputed and any number of micro-batches, on device, host and disk
(`estimate.fitting`). The fastest of all plans that fit is then searched. Sequence and batch are the same for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft import zoo
from weft.core.errors import ModelError
from weft.core.model_shape import ModelShape
from weft.plan.ask import Question, ask, usual_batch
from weft.plan.estimate import Estimate
from weft.plan.search import has_fitting_plan, search
from weft.plan.space import Freedom

SEQUENCE_LENGTH = 4096
MAX_BLOCKS = 4096
_ON_HOST = {"offload.parameters": "cpu", "activations.policy": "full", "activations.offload": "cpu"}
# (words, fixed keys), each with more off the device than the one before
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("all on the device", {"offload.optimizer": "none"}),
    ("optimizer states on the host", {"offload.optimizer": "cpu"}),
    ("states, weights, block inputs on the host", {"offload.optimizer": "cpu", **_ON_HOST}),
    ("states in files; weights, block inputs on the host", {"offload.optimizer": "nvme", **_ON_HOST}),
)


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest model for one way to offload; None: not even the smallest of the family fits."""

    way: str
    named: ModelShape | None
    scaled: ModelShape | None  # None: not larger than the named one
    best: Estimate | None  # the fastest plan of the larger of the two

    @property
    def shape(self) -> ModelShape | None:
        return self.scaled or self.named

    def as_dict(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "named": _as_dict(self.named),
            "scaled": _as_dict(self.scaled),
            "parameters": self.shape.num_parameters if self.shape else 0,
            "best": self.best.as_dict() if self.best else None,
        }


def largest_models(
    family: str,
    devices: str,
    *,
    host_memory_bytes: int | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    optimizer: str | None = None,
    precision: Mapping[str, Any] | str | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> tuple[Question, list[Largest]]:
    """(the question, with the family's smallest model; its largest models by way to offload).

    `fixed` wins over the keys of a way.
    """
    shapes = family_shapes(family)
    length = sequence_length or SEQUENCE_LENGTH
    question = ask(
        shapes[0],
        devices,
        global_batch=global_batch,
        sequence_length=length,
        optimizer=optimizer,
        precision=precision,
    )
    if host_memory_bytes is not None:
        question = question.with_host_memory(host_memory_bytes)
    request = question.request
    if global_batch is None:
        usual = usual_batch(shapes[0], length, num_devices=request.cluster.num_devices)
        request = replace(request, workload=replace(request.workload, global_batch=usual))
    question = replace(question, request=request)
    return question, [_largest(question, shapes, way, {**keys, **(fixed or {})}) for way, keys in WAYS]


def family_shapes(family: str) -> list[ModelShape]:
    """The zoo's models of a type, smallest first; one of each number of parameters."""
    wanted = family.strip().lower()
    by_type: dict[str, list[ModelShape]] = {}
    for name in zoo.names():
        shape = zoo.named(name)
        by_type.setdefault(shape.model_type, []).append(shape)
    if wanted not in by_type:
        raise ModelError(f"the zoo has no models of type {family!r}", hint=f"types: {', '.join(sorted(by_type))}")
    sizes = {shape.num_parameters: shape for shape in by_type[wanted]}
    return [sizes[count] for count in sorted(sizes)]


def with_blocks(shape: ModelShape, num_blocks: int) -> ModelShape:
    """`shape` with so many blocks: its own order, repeated where it is shorter."""
    order = tuple(shape.order[index % shape.num_layers] for index in range(num_blocks))
    return replace(shape, order=order, name=f"{shape.name} with {num_blocks} blocks")


def _largest(question: Question, shapes: list[ModelShape], way: str, fixed: dict[str, Any]) -> Largest:
    def fits(shape: ModelShape) -> bool:
        return has_fitting_plan(replace(question.request, shape=shape), fixed)

    fitting_shapes = [shape for shape in shapes if fits(shape)]
    named = fitting_shapes[-1] if fitting_shapes else None
    larger = [shape for shape in shapes if named is None or shape.num_parameters > named.num_parameters]
    scaled = _scaled(larger[0] if larger else shapes[-1], fits)
    if scaled is not None and named is not None and scaled.num_parameters <= named.num_parameters:
        scaled = None
    shape = scaled or named
    best = None
    if shape is not None:
        found = search(
            replace(question.request, shape=shape), freedom=Freedom(fixed=fixed), precision=question.precision, top=1
        )
        best = found.plans[0]
    return Largest(way=way, named=named, scaled=scaled, best=best)


def _scaled(shape: ModelShape, fits: Callable[[ModelShape], bool]) -> ModelShape | None:
    """`shape` with the most blocks that fit, by halving; None if one block does not."""
    if not fits(with_blocks(shape, 1)):
        return None
    below, above = 1, 2
    while above <= MAX_BLOCKS and fits(with_blocks(shape, above)):
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(with_blocks(shape, middle)) else (below, middle)
    return with_blocks(shape, below)


def _as_dict(shape: ModelShape | None) -> dict[str, Any] | None:
    if shape is None:
        return None
    return {"name": shape.name, "parameters": shape.num_parameters, "layers": shape.num_layers}
