"""`weft export`: a run's weights as a Hugging Face folder, in low-bit formats too."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.core.errors import BadValueError, InputError


class ExportDtype(StrEnum):
    AS_TRAINED = "as-trained"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LowBitFormat(StrEnum):
    INT8 = "int8"
    INT4 = "int4"
    FLOAT8 = "float8"
    GGUF_F16 = "gguf-f16"
    GGUF_BF16 = "gguf-bf16"
    GGUF_Q8_0 = "gguf-q8_0"
    GGUF_Q4_0 = "gguf-q4_0"


class CalibrationMethod(StrEnum):
    GPTQ = "gptq"


def export(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write; it must be new or empty.")] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="The step of the checkpoint; default the newest valid one.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Write the best checkpoint (checkpoint.keep_best) in place of the newest.")
    ] = False,
    dtype: Annotated[
        ExportDtype | None, typer.Option(help="The dtype of the weights; default as-trained, bfloat16 with --format.")
    ] = None,
    weights: Annotated[
        LowBitFormat | None,
        typer.Option("--format", help="Low-bit weights: a compressed-tensors folder, or a GGUF file."),
    ] = None,
    calibrate: Annotated[
        CalibrationMethod | None, typer.Option(help="Round --format by what the model computes; default to nearest.")
    ] = None,
    calibrate_rows: Annotated[int, typer.Option(min=1, help="Held-out rows to calibrate with.")] = 64,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with [adapter]: the full model, the adapter added to its base.")
    ] = False,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the average of the weights (train.ema_decay) in place of the last.")
    ] = False,
    evaluate_rows: Annotated[
        int, typer.Option(min=0, help="With --format: held-out rows for the perplexity before and after; 0: none.")
    ] = 16,
    compare: Annotated[
        bool, typer.Option("--compare", help="Print bytes and perplexity of every format; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the written files as JSON on stdout.")] = False,
) -> None:
    """Write a run's weights as a folder that AutoModelForCausalLM.from_pretrained loads.

    A run with [adapter] is written in PEFT's format, the adapter alone, unless --merge is given.
    """
    _require_options_agree(
        has_out=out is not None,
        compare=compare,
        is_measured=evaluate_rows > 0,
        weights=weights,
        calibrate=calibrate,
        dtype=dtype,
        names_two=best and step is not None,
    )
    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    from rich.console import Console

    from weft.train.export import compare_formats, export_run
    from weft.train.trained_tensors import best_step_of

    step = best_step_of(run) if best else step

    if compare:
        with Console(stderr=True).status("exporting and measuring every format"):
            found = compare_formats(run, step=step, calibrate_rows=calibrate_rows, evaluate_rows=evaluate_rows)
        print(json.dumps(found) if as_json else "\n".join(_compared_lines(found)))
        return
    is_adapter = _is_adapter_alone(run, merge=merge, weights=weights)
    if ema and is_adapter:
        raise InputError("an adapter alone is written as trained", hint="give --merge with --ema")
    if dtype is None:
        dtype = ExportDtype.AS_TRAINED if weights is None else ExportDtype.BFLOAT16
    with Console(stderr=True).status("exporting" if weights is None else f"exporting and measuring {weights}"):
        cast = None if dtype is ExportDtype.AS_TRAINED else dtype.value
        if is_adapter:
            from weft.train.adapter_export import export_adapter

            result = export_adapter(run, out or Path(), step=step, dtype=cast)
        else:
            result = export_run(
                run,
                out or Path(),
                step=step,
                dtype=cast,
                weights=weights.value if weights is not None else None,
                calibrate_rows=calibrate_rows if calibrate else 0,
                evaluate_rows=evaluate_rows,
                ema=ema,
            )
    _print_written(result, run, out, as_json=as_json)


def _print_written(result: dict[str, Any], run: Path, out: Path | None, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
    else:
        print(f"step {result['step']} of {run} is in {out} ({len(result['files'])} files)", file=sys.stderr)
        for line in _low_bit_lines(result["weights"]):
            print(line, file=sys.stderr)
    if result["note"]:
        print(f"note: {result['note']}", file=sys.stderr)


def _require_options_agree(
    *,
    has_out: bool,
    compare: bool,
    is_measured: bool,
    weights: LowBitFormat | None,
    calibrate: CalibrationMethod | None,
    dtype: ExportDtype | None,
    names_two: bool,
) -> None:
    if names_two:
        raise InputError("--best and --step name two checkpoints", hint="give one of them")
    if has_out == compare:
        raise InputError("give --out FOLDER, or --compare", hint="--compare measures all formats and keeps no folder")
    if compare and (weights or calibrate or dtype):
        raise InputError("--compare takes every format", hint="leave --format, --calibrate and --dtype out")
    if compare and not is_measured:
        raise InputError("--compare needs rows to measure", hint="give --evaluate-rows at least 1")
    if calibrate and weights is None:
        raise InputError("--calibrate is for low-bit weights", hint="add --format int4 or another format")
    if calibrate and weights and weights.startswith("gguf"):
        raise InputError("weights of GGUF files are rounded to nearest", hint="leave --calibrate out, or take int4")


def _is_adapter_alone(run: Path, *, merge: bool, weights: LowBitFormat | None) -> bool:
    """Whether the export is an adapter in PEFT's format."""
    from weft.train.trained_tensors import has_adapter

    is_adapter = has_adapter(run)
    if merge and not is_adapter:
        raise BadValueError(f"{run} has no adapter to merge", hint="leave --merge out")
    if is_adapter and not merge and weights is not None:
        raise BadValueError("--format is for full models, and this run trained an adapter", hint="add --merge")
    return is_adapter and not merge


def _low_bit_lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    from weft.core.units import format_bytes, format_count

    lines = [
        f"{format_count(found['quantised_parameters'])} parameters in {found['format']}, {format_bytes(found['bytes'])}"
        " of weights in all"
    ]
    lines += _calibration_lines(found["calibration"])
    lines += [f"kept in high precision, {reason}: {_some(names)}" for reason, names in found["kept"].items()]
    lines += found["notes"]
    measured = found.get("perplexity")
    if measured is None:
        return lines
    if "not_measured" in measured:
        return [*lines, f"perplexity was not measured: {measured['not_measured']}"]
    change = f"{measured['before']:.4f} -> {measured['after']:.4f} ({measured['change']:+.2%})"
    return [*lines, f"perplexity on {measured['rows']} held-out rows: {change}"]


def _calibration_lines(record: dict[str, Any] | None) -> list[str]:
    if record is None:
        return []
    lines = [f"{record['matrices']} matrices calibrated by GPTQ on {record['rows']} held-out rows"]
    if record["rounded"]:
        number = sum(record["rounded"].values())
        lines.append(f"{number} rounded to nearest, too few tokens: {_some(list(record['rounded']))}")
    return lines


def _compared_lines(found: dict[str, Any]) -> list[str]:
    from weft.core.units import format_bytes

    lines = [f"{'format':10} {'rounding':9} {'weights':>10} {'perplexity':>11} {'change':>8}"]
    lines += [
        f"{row['format']:10} {row['rounding']:9} {format_bytes(row['bytes']):>10} {row['perplexity']:11.4f}"
        f" {row['change']:+8.2%}"
        for row in found["formats"]
    ]
    return [*lines, f"on {found['rows']} held-out rows of step {found['step']}"]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
