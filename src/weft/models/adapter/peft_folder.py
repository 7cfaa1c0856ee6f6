"""A folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT's name = "base_model.model." + the name of the factor in the model
a module that is trained in full (modules_to_save) is stored under its own parameters' names, with the same prefix
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weft.core.adapter_spec import CONFIG_NAME, WEIGHTS_NAME, AdapterSpec
from weft.core.errors import AdapterError

PREFIX = "base_model.model."


class PeftFolder:
    """The stored factors of a folder, checked against the model's on construction; data is read on demand."""

    def __init__(self, folder: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._file = Path(folder).expanduser() / WEIGHTS_NAME
        try:
            with safe_open(str(self._file), framework="pt", device="cpu") as handle:
                found = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise AdapterError(
                f"{self._file} is missing or damaged: {error}", hint="adapter.path is a folder in PEFT's format"
            ) from error
        wanted = {f"{PREFIX}{name}": shape for name, shape in shapes.items()}
        for name in sorted(wanted.keys() ^ found.keys()):
            where, lacks = (self._file, "the model") if name in found else ("the model", self._file)
            raise AdapterError(
                f"{where} has {name}, which {lacks} lacks", hint="an adapter belongs to the base it was trained on"
            )
        for name, shape in wanted.items():
            if found[name] != shape:
                raise AdapterError(
                    f"{name} is {list(found[name])} in {self._file}, but {list(shape)} in the model",
                    hint="an adapter belongs to the base it was trained on",
                )

    def read(self, name: str) -> torch.Tensor:
        with safe_open(str(self._file), framework="pt", device="cpu") as handle:
            tensor: torch.Tensor = handle.get_tensor(f"{PREFIX}{name}")
            return tensor.clone()


def write_peft_folder(
    folder: Path,
    factors: Mapping[str, torch.Tensor],
    spec: AdapterSpec,
    *,
    base: str | None,
    revision: str | None = None,
    modules: Mapping[str, torch.Tensor] | None = None,
    others: Collection[str] = (),
    is_transposed: bool = False,
) -> list[Path]:
    """Write factors, and the parameters of `modules` that were trained in full, to `folder`; return the files.

    `others`: the names of all modules without an adapter."""
    tensors = {f"{PREFIX}{name}": value.contiguous() for name, value in {**factors, **(modules or {})}.items()}
    linears = {name.rpartition(".lora_")[0] for name in factors}
    config = peft_config(
        spec,
        target_modules(linears, others),
        base=base,
        revision=revision,
        modules=sorted({name.rpartition(".")[0] for name in modules or {}}),
        is_transposed=is_transposed,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [folder / CONFIG_NAME, folder / WEIGHTS_NAME]


def peft_config(
    spec: AdapterSpec, targets: list[str], *, base: str | None, revision: str | None, modules: list[str],
    is_transposed: bool,
) -> dict[str, Any]:  # fmt: skip
    """adapter_config.json of the adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": targets,
        "modules_to_save": modules or None,
    }


def target_modules(linears: Collection[str], others: Collection[str]) -> list[str]:
    """The last parts of the names ("q_proj") if no other module ends in one, else the full names."""
    ends = {name.rpartition(".")[2] for name in linears}
    is_unique = ends.isdisjoint(name.rpartition(".")[2] for name in others)
    return sorted(ends if is_unique else linears)
