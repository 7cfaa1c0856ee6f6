"""Export of a run's checkpoint as a Hugging Face folder: one process, one tensor at a time, never the full model.

The folder includes the run's tokenizer, the byte tokenizer too: it is complete as `model.path` of another run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import peek_newest, read_manifest, read_tensors
from weft.core.errors import CheckpointError, TokenizerError
from weft.core.run_spec import RunSpec
from weft.data import open_tokenizer
from weft.engine.state import MODEL
from weft.models.hf_export import export_folder
from weft.train.folder.run_folder import RunFolder, require_run


def export_run(run_dir: Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> dict[str, Any]:
    """Write the newest good (or the named) checkpoint of `run_dir` to `out`; return step, files and note."""
    from transformers import AutoConfig

    require_run(run_dir)
    folder = RunFolder(run_dir)
    checkpoint = peek_newest(folder.checkpoints_path, step=step)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no checkpoint", hint="train with checkpoint.at_end = true, the default")
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as tokenizer:
        note = _save_tokenizer(RunSpec.from_file(run_dir / "run.toml").tokenizer, Path(tokenizer))
        files = export_folder(
            AutoConfig.from_pretrained(str(folder.model_path), trust_remote_code=False),
            _model_tensors(checkpoint.path),
            out,
            dtype=getattr(torch, dtype) if dtype else None,
            tokenizer=None if note else Path(tokenizer),
        )
    return {"step": checkpoint.step, "out": str(out), "files": [file.name for file in files], "note": note}


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
