"""Export of a run's checkpoint as a Hugging Face folder: one process, one tensor at a time, never the full model.

The folder includes the run's tokenizer, the byte tokenizer too: it is complete as `model.path` of another run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import LoadedCheckpoint
from weft.core.errors import BadValueError, DataError, TokenizerError, WeftError, WeightsError
from weft.core.run_spec import RunSpec
from weft.data import open_tokenizer
from weft.data.byte_tokenizer import TEMPLATE_FILE
from weft.data.samples import read_template
from weft.models import gguf_export
from weft.models.hf_export import export_folder, skeleton_of
from weft.models.quantised import Quantiser
from weft.models.scalar_head import has_scalar_head
from weft.models.weight_codes import FORMATS
from weft.train.calibration import BlockCalibration
from weft.train.folder.run_folder import RunFolder
from weft.train.perplexity import HeldOutRows, why_not_loaded
from weft.train.trained_tensors import Order, checkpoint_of, full_tensors


def export_run(
    run_dir: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    calibrate_rows: int = 0,
    evaluate_rows: int = 0,
    ema: bool = False,
) -> dict[str, Any]:
    """Write the newest good (or the named) checkpoint of `run_dir` to `out`; return step, files and note.

    `ema` writes the average weights of `train.ema_decay`. Adapters are added to their base; `train/adapter_export.py`
    writes them alone.

    `weights` is a format of `models.weight_codes`, rounded to nearest or, with `calibrate_rows`, by GPTQ on so many
    held-out rows. With `evaluate_rows` the perplexity before and after is measured, on other rows.
    """
    source = replace(_Source.open(run_dir, step=step, dtype=dtype), ema=ema)
    rows = source.held_out(evaluate_rows) if weights and (evaluate_rows or calibrate_rows) else None
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as tokenizer:
        note = _save_tokenizer(source.run, Path(tokenizer))
        files, low_bit = source.write(
            out,
            weights=weights,
            tokenizer=None if note else Path(tokenizer),
            calibration=_calibration_rows(rows, calibrate_rows),
        )
    if low_bit is not None:
        low_bit["bytes"] = _weight_bytes(out)
        if evaluate_rows:
            low_bit["perplexity"] = _perplexity(source, rows, out)
    names = [file.name for file in files]
    return {"step": source.checkpoint.step, "out": str(out), "files": names, "note": note, "weights": low_bit}


def compare_formats(
    run_dir: Path, *, step: int | None = None, calibrate_rows: int, evaluate_rows: int
) -> dict[str, Any]:
    """Bytes and perplexity of every format, rounded to nearest and calibrated; no export is kept."""
    source = _Source.open(run_dir, step=step, dtype="bfloat16")
    rows = source.held_out(evaluate_rows)
    if isinstance(rows, WeftError):
        raise rows
    cases: list[tuple[str | None, int]] = [(None, 0)]
    cases += [(kind, count) for kind in FORMATS for count in (0, calibrate_rows)]
    cases += [(kind, 0) for kind in source.gguf_formats()]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weft-compare-") as scratch:
        for number, (kind, count) in enumerate(cases):
            out = Path(scratch, str(number))
            source.write(out, weights=kind, calibration=_calibration_rows(rows, count))
            missing = why_not_loaded(out)
            if missing:
                raise DataError(f"perplexity cannot be measured: {missing}", hint="export one --format instead")
            method = "" if kind is None else "gptq" if count else "nearest"
            measured = rows.perplexity(out)
            change = measured / found[0]["perplexity"] - 1 if found else 0.0
            row = {"format": kind or "bfloat16", "rounding": method, "bytes": _weight_bytes(out)}
            found.append(row | {"perplexity": measured, "change": change})
            shutil.rmtree(out)
    return {"step": source.checkpoint.step, "rows": rows.num_rows, "calibrate_rows": calibrate_rows, "formats": found}


@dataclass(frozen=True)
class _Source:
    """A checkpoint that is exported, once or in several formats."""

    run: RunSpec
    model_path: Path
    checkpoint: LoadedCheckpoint
    dtype: torch.dtype | None
    ema: bool = False

    @classmethod
    def open(cls, run_dir: Path, *, step: int | None, dtype: str | None) -> _Source:
        checkpoint, folder = checkpoint_of(run_dir, step=step), RunFolder(run_dir)
        run = RunSpec.from_file(run_dir / "run.toml")
        cast = getattr(torch, dtype) if dtype else None
        return cls(run, folder.model_path, checkpoint, cast)

    def gguf_formats(self) -> Sequence[str]:
        """The GGUF formats that the model can be written in and measured."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(self.model_path), trust_remote_code=False)
        return gguf_export.measured_formats(config)

    def _tensors(self, *, order: Order = list) -> Iterator[tuple[str, torch.Tensor]]:
        return full_tensors(self.run, self.checkpoint, order=order, ema=self.ema)

    def held_out(self, count: int) -> HeldOutRows | WeftError:
        """The rows to measure with; an error if the run's data has moved since."""
        try:
            return HeldOutRows(self.run, count)
        except WeftError as error:
            return error

    def write(
        self,
        out: Path,
        *,
        weights: str | None = None,
        tokenizer: Path | None = None,
        calibration: Sequence[dict[str, torch.Tensor]] = (),
    ) -> tuple[list[Path], dict[str, Any] | None]:
        """The files written, and a record of low-bit weights."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(self.model_path), trust_remote_code=False)
        skeleton = skeleton_of(config)
        if weights and has_scalar_head(config):
            raise BadValueError(
                "--format is for models that write text, and this is a reward model", hint="leave it out"
            )
        if weights in gguf_export.FORMATS:
            tensors = self._tensors()
            record = gguf_export.export_gguf(config, tensors, out, kind=weights, skeleton=skeleton, tokenizer=tokenizer)
            return sorted(out.iterdir()), record
        quantiser = Quantiser(skeleton, FORMATS[weights]) if weights else None
        tensors, calibrated = self._tensors(), None
        if quantiser is not None and calibration:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            dtype = self.dtype or torch.float32
            calibrated = BlockCalibration(config, calibration, quantiser, dtype=dtype, device=device)
            tensors = calibrated.tensors(self._tensors(order=calibrated.order))
        files = export_folder(
            config, tensors, out, skeleton=skeleton, dtype=self.dtype, tokenizer=tokenizer, quantiser=quantiser
        )
        if quantiser is None:
            return files, None
        used = calibrated.record.as_dict() if calibrated is not None else None
        return files, {"format": weights} | quantiser.record() | {"notes": [], "calibration": used}


def _calibration_rows(rows: HeldOutRows | WeftError | None, count: int) -> Sequence[dict[str, torch.Tensor]]:
    if not count or rows is None:
        return ()
    if isinstance(rows, WeftError):
        raise rows
    return rows.following(count)


def _weight_bytes(folder: Path) -> int:
    files = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _perplexity(source: _Source, rows: HeldOutRows | WeftError | None, out: Path) -> dict[str, Any]:
    """The perplexity of the same export without and with the low-bit weights, or why it was not measured."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-unquantised-", dir=out.parent) as scratch:
        plain = Path(scratch) / "plain"
        source.write(plain)
        missing = why_not_loaded(plain)
        if isinstance(rows, WeftError):  # the run's data has moved since: the export is good without
            missing = missing or rows.message
        if missing or not isinstance(rows, HeldOutRows):
            return {"not_measured": missing}
        try:
            before, after = rows.perplexity(plain), rows.perplexity(out)
        except WeightsError as error:
            return {"not_measured": error.message}
    return {"rows": rows.num_rows, "before": before, "after": after, "change": after / before - 1}


def _save_tokenizer(run: RunSpec, folder: Path) -> str:
    """Save the tokenizer; return why it failed: a tokenizer that has moved since must not prevent the export."""
    try:
        open_tokenizer(run.tokenizer).save(folder)
        if run.data.chat_template is not None:
            (folder / TEMPLATE_FILE).write_text(read_template(run.data.chat_template), encoding="utf-8")
    except TokenizerError as error:
        return f"the export has no tokenizer: {error.message}"
    return ""
