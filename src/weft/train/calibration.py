"""Calibration of low-bit weights on rows of tokens, block by block: the memory of one block and its products' inputs.

    for each block: run it on the rows -> G = X^T X of every linear layer and expert -> codes (`models/gptq.py`)
                    -> run it again with the rounded weights: the next block sees the inputs that it will have

The model's own forward runs, as on the stages of a pipeline with one block each, so families that cannot be divided
into stages are refused. An expert that too few tokens chose is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from weft.core.errors import PipelineError, WeightsError
from weft.engine.pp.stages import Stages
from weft.models.build import build_on_meta
from weft.models.gptq import calibrated_codes
from weft.models.layout import ROOT, ModelLayout, describe
from weft.models.pp.split import split_model
from weft.models.quantised import Quantiser
from weft.models.weight_codes import dequantised, quantise

Rows = dict[str, Tensor]

# Inputs of fewer rows than this share of the columns say too little about a matrix.
_LEAST_ROWS = 0.25


@dataclass
class CalibrationRecord:
    """What a calibration used, and the matrices that it could not calibrate: name -> how many."""

    rows: int
    tokens: int
    matrices: int = 0
    rounded: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return vars(self).copy()


class BlockCalibration:
    """Makes codes for `quantiser` while the model's tensors pass."""

    def __init__(
        self, config: Any, rows: Sequence[Rows], quantiser: Quantiser, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._quantiser, self._scale_dtype, self._device = quantiser, dtype, device
        self._model = _model_of(config)
        self._layout = describe(self._model)
        self._split = _chain_of(self._model, self._layout)
        self._stages = Stages(self._model, self._split, tuple(range(self._split.num_stages)))
        self._rows = [{name: value.to(device) for name, value in row.items() if name != "labels"} for row in rows]
        self._hidden: list[Tensor] = []
        tokens = sum(row["input_ids"].numel() for row in rows)
        self.record = CalibrationRecord(sum(len(row["input_ids"]) for row in rows), tokens)

    def order(self, names: Iterable[str]) -> list[str]:
        """The order in which `tensors` takes them: all outside the blocks, then block by block."""
        places = {block: place for place, block in enumerate(self._split.blocks)}
        return sorted(names, key=lambda name: places.get(self._block_of(name), -1))

    @torch.no_grad()
    def tensors(self, ordered: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors; codes of a block are with the quantiser before its tensors are given."""
        for block, given in groupby(ordered, key=lambda item: self._block_of(item[0])):
            if block == ROOT:
                for name, tensor in given:
                    self._place(name, tensor)
                    yield name, tensor
                for buffer in self._model.buffers():
                    buffer.data = buffer.to(self._device)
                continue
            held = dict(given)
            for name, tensor in held.items():
                self._place(name, tensor)
            self._calibrate(self._split.blocks.index(block), held)
            yield from held.items()
            for name in held:
                self._forget(name)

    def _calibrate(self, stage: int, held: dict[str, Tensor]) -> None:
        wanted = {name: self._model.get_parameter(name) for name in held if name in self._quantiser.model_names}
        inputs = _Inputs(wanted)
        self._run(stage, inputs)
        made = {}
        for name, parameter in wanted.items():
            codes, scales = self._codes(name, parameter, inputs)
            parameter.copy_(dequantised(codes, scales))
            made[name] = (codes.cpu(), scales.cpu())
        self._quantiser.take(made)
        if stage + 1 < self._split.num_stages:
            self._hidden = self._run(stage)

    def _run(self, stage: int, inputs: _Inputs | None = None) -> list[Tensor]:
        outputs = []
        for number, row in enumerate(self._rows):
            received = self._hidden[number] if stage else None
            with self._stages.forward_of(stage, received), inputs or _Nothing():
                outputs.append(self._model(**row, use_cache=False))
        return outputs

    def _codes(self, name: str, parameter: Tensor, inputs: _Inputs) -> tuple[Tensor, Tensor]:
        if parameter.ndim == 2:
            return self._matrix(name, parameter, inputs.gram(name, 0))
        made = [self._matrix(name, one, inputs.gram(name, place)) for place, one in enumerate(parameter)]
        # stack has no float8
        codes = torch.stack([one.view(torch.uint8) for one, _ in made]).view(made[0][0].dtype)
        return codes, torch.stack([scales for _, scales in made])

    def _matrix(self, name: str, weight: Tensor, gram: Tensor | None) -> tuple[Tensor, Tensor]:
        form, dtype = self._quantiser.format, self._scale_dtype
        if gram is None:
            self.record.rounded[name] = self.record.rounded.get(name, 0) + 1
            return quantise(weight, form, scale_dtype=dtype)
        if not gram.isfinite().all():
            raise WeightsError(
                f"inputs of {name} overflow on the calibration rows, so its codes cannot be calibrated",
                hint="export a checkpoint from before the run diverged, or leave --calibrate out",
            )
        self.record.matrices += 1
        return calibrated_codes(weight, gram, form, scale_dtype=dtype)

    def _block_of(self, name: str) -> str:
        found = self._layout.unit_of.get(self._layout.ties.get(name, name))
        if found is None:  # a persistent buffer
            found = next((block for block in self._split.blocks if name.startswith(f"{block}.")), ROOT)
        return found if found in self._split.blocks else ROOT

    def _place(self, name: str, tensor: Tensor) -> None:
        names = [name, *(alias for alias, kept in self._layout.ties.items() if kept == name)]
        value = tensor.to(self._device, torch.float32 if tensor.is_floating_point() else tensor.dtype)
        parameter = nn.Parameter(value.clone(), requires_grad=False) if value.is_floating_point() else None
        for one in names:
            owner, _, key = one.rpartition(".")
            module = self._model.get_submodule(owner)
            if key in module._parameters:
                module._parameters[key] = parameter
            else:
                module._buffers[key] = value.clone()

    def _forget(self, name: str) -> None:
        owner, _, key = name.rpartition(".")
        module = self._model.get_submodule(owner)
        old = module._parameters.get(key)
        if old is not None:
            module._parameters[key] = nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=False)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Inputs(TorchFunctionMode):
    """Sums G of the inputs of every product with a wanted parameter, or with one expert's matrix of it."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = {one.untyped_storage().data_ptr(): name for name, one in parameters.items()}
        self._shapes = {name: tuple(one.shape) for name, one in parameters.items()}
        self._rows: dict[tuple[str, int], list[Tensor]] = {}
        self._grams: dict[tuple[str, int], Tensor] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            self._see(*chain(args, (kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def gram(self, name: str, place: int) -> Tensor | None:
        """G of expert `place`; None if too few inputs were seen."""
        key = (name, place)
        if self._counts.get(key, 0) < max(1, _LEAST_ROWS * self._shapes[name][-1]):
            return None
        self._fold(key)
        return self._grams.pop(key) / self._counts[key]

    def _see(self, inputs: Tensor, weight: Tensor, *_: Any) -> None:
        name = self._names.get(weight.untyped_storage().data_ptr())
        if name is None or tuple(weight.shape) != self._shapes[name][-2:] or not weight.is_contiguous():
            return
        key = (name, weight.storage_offset() // weight.numel())
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        self._rows.setdefault(key, []).append(rows)
        self._counts[key] = self._counts.get(key, 0) + len(rows)
        # few rows are smaller than G: most experts see few
        if sum(map(len, self._rows[key])) > rows.shape[-1]:
            self._fold(key)

    def _fold(self, key: tuple[str, int]) -> None:
        held = self._rows.pop(key, [])
        if held:
            rows = torch.cat(held)
            self._grams[key] = self._grams.get(key, 0) + rows.T @ rows


def _model_of(config: Any) -> nn.Module:
    model = build_on_meta(config).eval()
    # experts one by one: a grouped product does not show which rows are whose
    set_experts = getattr(model, "set_experts_implementation", None)
    if set_experts is not None and model._can_set_experts_implementation():  # type: ignore[operator]
        set_experts("eager")
    return model


def _chain_of(model: nn.Module, layout: ModelLayout) -> Any:
    try:
        return split_model(model, layout, num_stages=len(layout.blocks))
    except PipelineError as error:
        raise WeightsError(
            f"{type(model).__name__} cannot be calibrated block by block: {error.message}",
            hint="leave --calibrate out: weights are rounded to nearest",
        ) from error
