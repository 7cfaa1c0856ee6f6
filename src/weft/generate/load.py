"""The model and tokenizer of a run folder or of a Hugging Face folder, for inference."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from weft.core.errors import DeviceError, ModelError, RunFolderError, TokenizerError, first_line
from weft.core.units import format_bytes
from weft.engine.offload.host_room import available_bytes
from weft.train.export import export_run


@dataclass(frozen=True)
class LoadedModel:
    """A model that generates; `tokenizer` is one of transformers."""

    model: PreTrainedModel
    tokenizer: Any
    step: int | None  # of the run's checkpoint
    num_ranks: int = 1  # that hold shards of it


def load(source: Path, *, step: int | None, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load a run's checkpoint or a folder."""
    with exported(source, step=step, dtype=dtype) as (folder, of_step):
        model, tokenizer = _load_folder(folder, dtype=dtype, device=device)
    return LoadedModel(model, tokenizer, of_step)


@contextmanager
def exported(source: Path, *, step: int | None, dtype: torch.dtype) -> Iterator[tuple[Path, int | None]]:
    """A folder of Hugging Face's format and its step: `source`, or an export beside a run that is removed again."""
    if (source / "run.toml").is_file():
        with tempfile.TemporaryDirectory(prefix=".generate-", dir=source) as scratch:
            made = export_run(source, Path(scratch) / "model", step=step, dtype=str(dtype).removeprefix("torch."))
            _require_writes(Path(scratch) / "model")
            yield Path(scratch) / "model", made["step"]
        return
    if not (source / "config.json").is_file():
        raise RunFolderError(
            f"{source} is neither a run folder nor a Hugging Face folder",
            hint="give a folder with run.toml, or one with config.json as `weft export` writes it",
        )
    if step is not None:
        raise RunFolderError(f"{source} has no steps", hint="--step is for run folders")
    _require_writes(source)
    yield source, None


def _require_writes(folder: Path) -> None:
    """Refuse a reward model, whose head scores text and writes none."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        raise ModelError(
            f"{folder} is a sequence classifier, which writes no text",
            hint="load it with transformers' AutoModelForSequenceClassification to score text",
        )


def open_folder_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, by transformers."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{folder} has no tokenizer: {first_line(error)}", hint="copy the tokenizer's files into the folder"
        ) from None


def _load_folder(folder: Path, *, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, Any]:
    require_room(folder, device)
    tokenizer = open_folder_tokenizer(folder)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    return model.eval().to(device), tokenizer


def require_room(folder: Path, device: torch.device, *, num_ranks: int = 1) -> None:
    """Refuse weights that do not fit, on each of `num_ranks` ranks that share them."""
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // num_ranks
    places = {"host memory": available_bytes()}
    if device.type == "cuda":
        places["device memory"] = torch.cuda.mem_get_info(device)[0]
    for place, free in places.items():
        if free is not None and needed > free:
            raise DeviceError(
                f"the weights in {folder} need {format_bytes(needed)}, and {format_bytes(free)} of {place} are free",
                hint="weft export --format int8 or int4 makes them smaller, --nproc N shards them over N devices",
            )
