"""`weft export`: a run's weights as a Hugging Face folder."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExportDtype(StrEnum):
    AS_TRAINED = "as-trained"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must be new or empty.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="The step of the checkpoint; default the newest valid one.")
    ] = None,
    dtype: Annotated[ExportDtype, typer.Option(help="The dtype of the weights.")] = ExportDtype.AS_TRAINED,
    as_json: Annotated[bool, typer.Option("--json", help="Print the written files as JSON on stdout.")] = False,
) -> None:
    """Write a run's weights as a folder that AutoModelForCausalLM.from_pretrained loads."""
    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    from weft.train.export import export_run

    result = export_run(run, out, step=step, dtype=None if dtype is ExportDtype.AS_TRAINED else dtype.value)
    if as_json:
        print(json.dumps(result))
    else:
        print(f"step {result['step']} of {run} is in {out} ({len(result['files'])} files)", file=sys.stderr)
    if result["note"]:
        print(f"note: {result['note']}", file=sys.stderr)
