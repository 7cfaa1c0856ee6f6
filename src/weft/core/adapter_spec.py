"""`AdapterSpec`: low-rank adapters of a frozen base model, the section [adapter] of run.toml. No torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from weft.core.config import Section

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"  # of a folder in PEFT's format
_FROM_FOLDER = ("rank", "alpha", "rslora", "targets")
# keys of PEFT's adapter_config.json that change what an adapter computes, with the values that weft has
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "megatron_config": (None,),
}


class AdapterSpec(Section):
    """Low-rank adapters beside linear layers of the blocks; every other parameter is frozen."""

    kind: Literal["none", "lora"] = Field(default="none", description="none | lora")
    rank: int = Field(default=16, ge=1, description="the inner size of the factors A and B, at least 1")
    alpha: float = Field(
        default=32.0, gt=0, description="the product B A is multiplied by alpha / rank (rslora: alpha / sqrt(rank))"
    )
    rslora: bool = Field(default=False, description="divide alpha by sqrt(rank) instead of rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout of the inputs of A in training")
    targets: list[str] = Field(
        default_factory=list,
        description="glob patterns of linear layers, by full name or by its end ('q_proj', '*.mlp.*'); "
        "empty: all linear layers of the blocks except routers",
    )
    train_also: list[str] = Field(
        default_factory=list, description="glob patterns of parameters of the base that are trained too, in full"
    )
    base: Literal["model", "bfloat16", "int8", "nf4"] = Field(
        default="model",
        description="how frozen weights are stored: model (as the plan's precision stores trained ones) | bfloat16 | "
        "int8 | nf4 (QLoRA: linear layers of the blocks in 8 or 4 bits, the others in the compute dtype)",
    )
    path: str | None = Field(
        default=None,
        description="a folder in PEFT's format whose adapter the training continues; rank, alpha and targets are its",
    )

    @property
    def is_on(self) -> bool:
        return self.kind != "none"

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def is_quantised(self) -> bool:
        return self.base in ("int8", "nf4")

    @model_validator(mode="after")
    def _has_kind(self) -> AdapterSpec:
        if not self.is_on and self != AdapterSpec.model_construct():
            raise ValueError("the keys of [adapter] need kind = 'lora'")
        return self

    @model_validator(mode="after")
    def _as_the_folder(self) -> AdapterSpec:
        """Take rank, alpha and targets from `path`, so that run.toml of a run folder has them."""
        if self.path is None:
            return self
        found = read_folder_keys(Path(self.path).expanduser())
        if found is None and not set(_FROM_FOLDER) <= self.model_fields_set:
            raise ValueError(f"path = {self.path!r} has no {CONFIG_NAME}")
        for key, value in (found or {}).items():
            if key in self.model_fields_set and getattr(self, key) != value:
                shown = "" if key == "targets" else f" = {getattr(self, key)!r}"
                raise ValueError(f"{key}{shown} is not that of {self.path}: leave it out")
            object.__setattr__(self, key, value)  # frozen, and not yet seen by anyone
        return self


def read_folder_keys(folder: Path) -> dict[str, Any] | None:
    """rank, alpha, rslora and targets of a folder in PEFT's format; None without one. ValueError: what weft lacks."""
    try:
        fields = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        raise ValueError(f"{folder / CONFIG_NAME} is not JSON") from None
    if not isinstance(fields, dict) or "r" not in fields:
        raise ValueError(f"{folder / CONFIG_NAME} is not the config of a LoRA adapter")
    for key, values in _SUPPORTED.items():
        if fields.get(key) not in values:
            raise ValueError(f"{folder} has {key} = {fields.get(key)!r}, which weft does not train")
    return {
        "rank": int(fields["r"]),
        "alpha": float(fields.get("lora_alpha", 8)),
        "rslora": bool(fields.get("use_rslora", False)),
        "targets": _stored_modules(folder / WEIGHTS_NAME),
    }


def _stored_modules(file: Path) -> list[str]:
    """The modules of an adapter file, from its header: a config may name them by a regular expression."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError, OverflowError, MemoryError):
        raise ValueError(f"{file} is missing or damaged") from None
    marks = (".lora_A.", ".lora_B.")
    names = {name.split(mark)[0] for name in header for mark in marks if mark in name}
    return sorted(name.removeprefix("base_model.model.") for name in names)
