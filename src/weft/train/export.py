"""Export of a run's checkpoint as a Hugging Face folder: one process, one tensor at a time, never the full model.

The folder includes the run's tokenizer, the byte tokenizer too: it is complete as `model.path` of another run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import peek_newest, read_manifest, read_tensors
from weft.core.errors import CheckpointError, TokenizerError, WeftError
from weft.core.run_spec import RunSpec
from weft.data import open_tokenizer
from weft.engine.state import MODEL
from weft.models.hf_export import export_folder, skeleton_of
from weft.models.quantised import FORMATS, Quantiser
from weft.train.folder.run_folder import RunFolder, require_run
from weft.train.perplexity import HeldOutRows, why_not_loaded


def export_run(
    run_dir: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    evaluate_rows: int = 0,
) -> dict[str, Any]:
    """Write the newest good (or the named) checkpoint of `run_dir` to `out`; return step, files and note.

    `weights` is a format of `models.quantised`; with `evaluate_rows` the perplexity before and after is measured.
    """
    require_run(run_dir)
    folder = RunFolder(run_dir)
    checkpoint = peek_newest(folder.checkpoints_path, step=step)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no checkpoint", hint="train with checkpoint.at_end = true, the default")
    run = RunSpec.from_file(run_dir / "run.toml")
    source = _Source(folder.model_path, checkpoint.path, dtype=getattr(torch, dtype) if dtype else None)
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as tokenizer:
        note = _save_tokenizer(run.tokenizer, Path(tokenizer))
        files, low_bit = source.write(out, weights=weights, tokenizer=None if note else Path(tokenizer))
    if low_bit is not None:
        low_bit["bytes"] = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
        if evaluate_rows:
            low_bit["perplexity"] = _perplexity(source, run, out, num_rows=evaluate_rows)
    names = [file.name for file in files]
    return {"step": checkpoint.step, "out": str(out), "files": names, "note": note, "weights": low_bit}


@dataclass(frozen=True)
class _Source:
    """A checkpoint that is exported, once or in two formats."""

    model_path: Path
    checkpoint: Path
    dtype: torch.dtype | None

    def write(
        self, out: Path, *, weights: str | None = None, tokenizer: Path | None = None
    ) -> tuple[list[Path], dict[str, Any] | None]:
        """The files written, and a record of low-bit weights."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(self.model_path), trust_remote_code=False)
        skeleton = skeleton_of(config)
        quantiser = Quantiser(skeleton, FORMATS[weights]) if weights else None
        tensors = _model_tensors(self.checkpoint)
        files = export_folder(
            config, tensors, out, skeleton=skeleton, dtype=self.dtype, tokenizer=tokenizer, quantiser=quantiser
        )
        return files, None if quantiser is None else {"format": weights} | quantiser.record()


def _perplexity(source: _Source, run: RunSpec, out: Path, *, num_rows: int) -> dict[str, Any]:
    """The perplexity of the same export without and with the low-bit weights, or why it was not measured."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-unquantised-", dir=out.parent) as scratch:
        plain = Path(scratch) / "plain"
        source.write(plain)
        missing = why_not_loaded(plain)
        if missing:
            return {"not_measured": missing}
        try:
            rows = HeldOutRows(run, num_rows)
        except WeftError as error:  # the run's data has moved since: the export is good without
            return {"not_measured": error.message}
        before, after = rows.perplexity(plain), rows.perplexity(out)
    return {"rows": rows.num_rows, "before": before, "after": after, "change": after / before - 1}


def _model_tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    keys = [key for key in read_manifest(checkpoint).tensors if key.startswith(MODEL)]
    for key, tensor in read_tensors(checkpoint, keys):
        yield key.removeprefix(MODEL), tensor


def _save_tokenizer(name: str, folder: Path) -> str:
    """Save the tokenizer; return why it failed: a tokenizer that has moved since must not prevent the export."""
    try:
        open_tokenizer(name).save(folder)
    except TokenizerError as error:
        return f"the export has no tokenizer: {error.message}"
    return ""
