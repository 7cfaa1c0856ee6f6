"""Export of a run's adapter as a folder in PEFT's format: the adapter alone, without its base."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.core.errors import AdapterError
from weft.core.run_spec import RunSpec
from weft.models.adapter.build import run_skeleton
from weft.models.adapter.lora import adapted_linears, factor_names
from weft.models.adapter.peft_folder import write_peft_folder
from weft.models.build import build_config
from weft.models.hf_export import committed_folder, require_free
from weft.models.layout import find_ties
from weft.models.tp.roles import linear_facts
from weft.train.trained_tensors import checkpoint_of, saved_tensors

MERGE_HINT = "export the merged model: weft export RUN --merge --out FOLDER"


def export_adapter(run_dir: Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> dict[str, Any]:
    """Write the adapter of the newest good (or the named) checkpoint to `out`; return step and files."""
    checkpoint, run = checkpoint_of(run_dir, step=step), RunSpec.from_file(run_dir / "run.toml")
    require_free(out)
    model = run_skeleton(run, build_config(run.model, vocab_size=1))
    cast = getattr(torch, dtype) if dtype else None
    tensors = {name: value.to(cast or value.dtype) for name, value in saved_tensors(checkpoint.path, run=run)}
    linears = {name for name, _ in adapted_linears(model)}
    others = [name for name, module in model.named_modules() if linear_facts(name, module) and name not in linears]
    with committed_folder(out) as folder:
        write_peft_folder(
            folder,
            {name: tensors[name] for name in factor_names(model)},
            run.adapter,
            base=run.model.path,
            revision=run.model.revision,
            modules={name: tensors[name] for name in _trained_also(model, run)},
            others=others,
            is_transposed=any(linear_facts(name, model.get_submodule(name)).is_transposed for name in linears),  # type: ignore[union-attr]
        )
    names = [file.name for file in sorted(out.iterdir())]
    return {"step": checkpoint.step, "out": str(out), "files": names, "note": "", "weights": None}


def _trained_also(model: nn.Module, run: RunSpec) -> list[str]:
    """Parameters of the base that were trained: PEFT stores modules, so all parameters of one, and untied."""
    patterns, ties = run.adapter.train_also, find_ties(model)
    names = [name for name, _ in model.named_parameters() if any(fnmatchcase(name, one) for one in patterns)]
    for name in names:
        owner = name.rpartition(".")[0]
        for key, _ in model.get_submodule(owner).named_parameters():
            if f"{owner}.{key}" not in names:
                raise AdapterError(
                    f"PEFT stores trained modules whole, and {owner}.{key} was not trained beside {name}",
                    hint=MERGE_HINT,
                )
        if name in ties or name in ties.values():
            raise AdapterError(f"{name} is tied to another parameter, which PEFT's format cannot say", hint=MERGE_HINT)
    return names
