"""`weft import`: a checkpoint of torchtitan, Megatron-LM, DeepSpeed or torch's DCP as a Hugging Face folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.export import ExportDtype
from weft.core.errors import ModelError


def import_checkpoint(
    given: Annotated[Path, typer.Argument(metavar="FROM", help="The folder of the checkpoint, or of all its steps.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must be new or empty.")],
    config: Annotated[
        Path | None,
        typer.Option(help="The model: a Hugging Face folder or its config.json; default config.json in FROM."),
    ] = None,
    dtype: Annotated[ExportDtype, typer.Option(help="The dtype of the weights.")] = ExportDtype.AS_TRAINED,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON on stdout.")] = False,
) -> None:
    """Write a checkpoint of torchtitan, Megatron-LM (torch_dist), DeepSpeed or torch DCP as a Hugging Face folder.

    Weights alone: optimizer states stay behind. The tokenizer comes from --config, if that folder has one."""
    folder = _config_folder(config or given)
    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    import torch

    from weft.models.hf_config import config_from_folder
    from weft.models.imports import convert

    cast = None if dtype is ExportDtype.AS_TRAINED else getattr(torch, dtype.value)
    tokenizer = folder if any(folder.glob("tokenizer*")) else None
    model = config_from_folder(folder, {}, name=str(folder))
    found: dict[str, Any] = convert.import_checkpoint(given, out, config=model, dtype=cast, tokenizer=tokenizer)
    if as_json:
        print(json.dumps(found))
        return
    kind = f"{found['format']}, {found['names']} names"
    print(f"{found['tensors']} tensors of {found['from']} ({kind}) are in {out}", file=sys.stderr)


def _config_folder(given: Path) -> Path:
    """The folder of a config.json; ModelError without one."""
    folder = given.parent if given.name == "config.json" else given
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json, and the checkpoint does not describe its model",
            hint="--config takes the Hugging Face folder that the training began from, or its config.json",
        )
    return folder
