"""Checkpoints of DeepSpeed: float32 masters of ZeRO 1 to 3 from all ranks' files, and universal checkpoints.

ZeRO-1/2   per group: partitions of all ranks joined = parameters one after another, padded at the end
ZeRO-3     per parameter: every rank has ceil(elements / ranks), padded on the last; one after another
universal  zero/NAME/fp32.pt, one folder per parameter
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.core.errors import WeightsError
from weft.models.imports.safe_pickle import load_tensors

MODEL_STATES, OPTIMIZER_STATES, UNIVERSAL = "*model_states.pt", "*_optim_states.pt", "zero"


class UniversalSource:
    """A universal checkpoint, made by ds_to_universal.py."""

    def __init__(self, folder: Path) -> None:
        self._files = {file.parent.name: file for file in sorted((folder / UNIVERSAL).glob("*/fp32.pt"))}
        if not self._files:
            raise WeightsError(
                f"{folder / UNIVERSAL} has no NAME/fp32.pt", hint="ds_to_universal.py writes a universal checkpoint"
            )
        self.shapes = {name: tuple(self.read(name).shape) for name in self._files}

    def read(self, name: str) -> torch.Tensor:
        stored = load_tensors(self._files[name])
        value: torch.Tensor = stored["param"] if isinstance(stored, Mapping) else stored
        return value


class ZeroSource:
    """A checkpoint of ZeRO 1, 2 or 3 by the files of all ranks; without optimizer files, the module's own weights."""

    def __init__(self, folder: Path) -> None:
        model_files = _of_one_tensor_rank(sorted(folder.glob(MODEL_STATES), key=_rank_of))
        self._models = [load_tensors(file) for file in model_files]
        states = [load_tensors(file) for file in sorted(folder.glob(OPTIMIZER_STATES), key=_rank_of)]
        self._optimizers = [state["optimizer_state_dict"] for state in states]
        first = self._models[0]
        self._module: dict[str, torch.Tensor] = dict(first.get("module") or {})
        self._shared: dict[str, str] = dict(first.get("shared_params") or {})
        self._places = dict(self._find_places(folder)) if states else {}
        self._frozen = {name: tuple(shape) for name, shape in (first.get("frozen_param_shapes") or {}).items()}
        names = [*self._places, *self._frozen] if states else list(self._module)
        names += [name for name in first.get("buffer_names") or () if name in self._module]
        self.shapes = {name: self._shape_of(name) for name in names}
        self.shapes |= {alias: self.shapes[name] for alias, name in self._shared.items() if name in self.shapes}

    def read(self, name: str) -> torch.Tensor:
        name = self._shared.get(name, name) if name not in self._places else name
        if name in self._frozen:
            return self._frozen_value(name)
        if name not in self._places:
            return self._module[name]
        group, offset, shape = self._places[name]
        numel = math.prod(shape)
        if self._is_stage_3:
            return self._stage_3_value(offset, numel).view(shape)
        return _slice_of(
            [state["single_partition_of_fp32_groups"][group] for state in self._optimizers], offset, numel
        ).view(shape)

    @property
    def _is_stage_3(self) -> bool:
        return bool(self._optimizers) and int(self._optimizers[0]["zero_stage"]) == 3

    def _shape_of(self, name: str) -> tuple[int, ...]:
        if name in self._places:
            return self._places[name][2]
        return self._frozen[name] if name in self._frozen else tuple(self._module[name].shape)

    def _find_places(self, folder: Path) -> Iterator[tuple[str, tuple[int, int, tuple[int, ...]]]]:
        """Group, offset and shape of every parameter; the offset of ZeRO-3 is that of a rank."""
        ranks = self._optimizers[0]["partition_count"]
        count = max(ranks) if isinstance(ranks, Sequence) else int(ranks)
        if count != len(self._optimizers):
            raise WeightsError(
                f"{folder} has optimizer files of {len(self._optimizers)} ranks, but was written by {count}",
                hint="copy the zero_pp_rank_*_optim_states.pt of all ranks into it",
            )
        offset = 0
        for group, shapes in enumerate(self._models[0]["param_shapes"]):
            offset = offset if self._is_stage_3 else 0
            for name, given in shapes.items():
                shape = tuple(given)
                yield name, (group, offset, shape)
                numel = math.prod(shape)
                offset += math.ceil(numel / count) if self._is_stage_3 else numel

    def _stage_3_value(self, offset: int, numel: int) -> torch.Tensor:
        part = math.ceil(numel / len(self._optimizers))
        parts = [_slice_of(state["fp32_flat_groups"], offset, part) for state in self._optimizers]
        return torch.cat(parts)[:numel]

    def _frozen_value(self, name: str) -> torch.Tensor:
        if not self._is_stage_3:
            value: torch.Tensor = self._models[0]["frozen_param_fragments"][name]
            return value
        parts = [model["frozen_param_fragments"][name].flatten() for model in self._models]
        shape = self._frozen[name]
        return torch.cat(parts)[: math.prod(shape)].view(shape)


def _slice_of(parts: Sequence[torch.Tensor], offset: int, numel: int) -> torch.Tensor:
    """Elements of flat tensors that lie one after another."""
    found = []
    for part in parts:
        begin, end = max(0, offset), min(part.numel(), offset + numel)
        if begin < end:
            found.append(part[begin:end])
        offset -= part.numel()
    value = torch.cat(found) if found else torch.empty(0)
    if value.numel() != numel:
        raise WeightsError(
            f"the flat groups end after {value.numel()} of {numel} elements of a parameter",
            hint="the files are of different steps, or one is incomplete",
        )
    return value


def _of_one_tensor_rank(files: Sequence[Path]) -> list[Path]:
    if not files:
        raise WeightsError("the checkpoint has no *_model_states.pt", hint="copy the files of rank 0 into it")
    if any(not re.search(r"mp_rank_00_", file.name) for file in files):
        raise WeightsError(
            "the checkpoint is of several model-parallel ranks, whose shards DeepSpeed does not describe",
            hint="convert it with ds_to_universal.py, and import the universal checkpoint",
        )
    return list(files)


def _rank_of(path: Path) -> tuple[int, str]:
    found: Any = re.search(r"pp_rank_(\d+)_", path.name)
    return (int(found.group(1)) if found else 0, path.name)
