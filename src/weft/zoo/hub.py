"""`model_folder`: the folder with a model's files: a folder on this disk, or the snapshot of a hub name in the cache.

A hub name is looked up once per process, with one request; without the network the cache alone decides, at once.
The cache is Hugging Face's own (HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE). Several processes may ask at the same time:
each file is downloaded by one of them while the others wait at its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from weft.core.errors import ModelError, WeightsError
from weft.core.run_spec import ModelSpec, RunSpec

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
_REQUEST_TIMEOUT_S = 10.0
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
# copies of the same weights for other programs
_LEFT_OUT = ("*/*", "consolidated*")


def is_local(path: str) -> bool:
    """Whether `model.path` means a folder rather than a hub name."""
    return Path(path).expanduser().exists() or path.startswith((".", "/", "~")) or path.count("/") > 1


def model_folder(path: str, *, revision: str | None = None, weights: bool = False) -> Path:
    """The folder that has the model's config.json, and its weights where they are asked for and exist."""
    folder = Path(path).expanduser() if is_local(path) else snapshot_folder(path, revision=revision, weights=weights)
    if not (folder / CONFIG_NAME).is_file():
        raise ModelError(f"there is no {CONFIG_NAME} in {path}", hint="model.path is a folder saved by save_pretrained")
    return folder


def with_model_files(run: RunSpec) -> RunSpec:
    """The run once its model's files are on this disk; of a hub name it records the commit that was taken.

    Called before ranks join: a download may outlast any collective, and what is missing is found before all else.
    """
    spec = run.model
    if spec.path is None:
        return run
    folder = model_folder(spec.path, revision=spec.revision, weights=reads_weights(spec))
    if reads_weights(spec):
        require_weights(folder, name=spec.path)
    commit = None if is_local(spec.path) else commit_of(folder)
    if commit is None:
        return run
    taken = spec.model_copy(update={"revision": commit})
    is_own = run.tokenizer == spec.own_tokenizer  # then it is of the same commit
    data = run.data.model_copy(update={"tokenizer": taken.own_tokenizer}) if is_own else run.data
    return run.model_copy(update={"model": taken, "data": data})


def reads_weights(spec: ModelSpec) -> bool:
    """A path means its weights; random ones must be asked for."""
    return spec.path is not None and spec.weights != "random"


def require_weights(folder: Path, *, name: str) -> None:
    """A model that was to be fine-tuned must never train from random values instead."""
    if (folder / SINGLE_NAME).is_file() or (folder / INDEX_NAME).is_file():
        return
    others = sorted(file.name for pattern in _OTHER_FORMATS for file in folder.glob(pattern))
    found = f"; it has {others[0]}, which weft does not read" if others else ""
    convert = "load it with transformers and write *.safetensors with save_pretrained, or " if others else ""
    raise WeightsError(
        f"{name} has no {SINGLE_NAME} or {INDEX_NAME}{found}",
        hint=f'{convert}set model.weights = "random" to train from random values',
    )


def cached_folder(name: str, *, revision: str | None = None) -> Path | None:
    """The snapshot of a hub name that is on this disk already and has a config.json; asks no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG_NAME, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def commit_of(folder: Path) -> str | None:
    """The commit whose files a snapshot folder of the cache holds."""
    return folder.name if folder.parent.name == "snapshots" else None


def snapshot_folder(name: str, *, revision: str | None = None, weights: bool = False) -> Path:
    """The files of a hub name on this disk: its small ones, and its weights where they are asked for."""
    from huggingface_hub import constants

    return _snapshot(name, revision, weights, Path(constants.HF_HUB_CACHE))


@cache
def _snapshot(name: str, revision: str | None, weights: bool, cache_dir: Path) -> Path:
    from huggingface_hub import snapshot_download

    commit, reason = _newest_commit(name, revision)
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        with _no_retries_shown():
            folder = snapshot_download(
                name,
                revision=commit or revision,
                cache_dir=cache_dir,
                local_files_only=commit is None,
                allow_patterns=patterns,
                ignore_patterns=list(_LEFT_OUT),
            )
    except Exception as error:  # the network's, the hub's and the disk's exceptions have no common parent
        raise _not_there(name, reason or _first_line(error)) from None
    return Path(folder)


def _newest_commit(name: str, revision: str | None) -> tuple[str | None, str]:
    """The commit the hub has for a revision; or None, and why the cache alone must do."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError

    if constants.HF_HUB_OFFLINE:
        return None, "HF_HUB_OFFLINE is set"
    try:
        found: Any = HfApi().model_info(name, revision=revision, timeout=_REQUEST_TIMEOUT_S)
    except HFValidationError:
        raise ModelError(
            f"{name!r} is neither a folder nor a hub name", hint="model.path is a folder, or OWNER/NAME on the hub"
        ) from None
    except Exception as error:  # as above
        return None, _first_line(error)
    return str(found.sha), ""


def _not_there(name: str, reason: str) -> ModelError:
    return ModelError(
        f"{name} is no folder, is not in the Hugging Face cache, and cannot be downloaded: {reason}",
        hint=f"give the path of a folder, or fill the cache where there is a network: hf download {name}",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def _no_retries_shown() -> Iterator[None]:
    """The library logs each of its retries on stderr; what counts is how it ends."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
