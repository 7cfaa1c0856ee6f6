"""Streams a model's tensors into a folder that `AutoModelForCausalLM.from_pretrained` loads. It gathers nothing.

Names and shapes in the files are those of the family's checkpoints on the hub (one matrix per expert, say), which
other programs read. Where transformers cannot invert its own rules, the model's own names are written, which
from_pretrained reads as well. Everything is written to a temporary folder beside `out`; the rename is the commit.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from weft.core.errors import RunFolderError, TokenizerError, WeightsError
from weft.core.synced import sync_path
from weft.models.conversion import SavePlan
from weft.models.pretrained import saved_tensors, stored_ties, unique_names
from weft.models.quantised import Quantiser
from weft.models.scalar_head import classifier_config, classifier_tensors, has_scalar_head
from weft.models.shard_writer import ShardWriter

MAX_SHARD_BYTES = 2 * 1024**3
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*",
    "*.tiktoken",
    "chat_template*",
)


def export_folder(
    config: PretrainedConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    *,
    skeleton: PreTrainedModel | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tied: Mapping[str, str] | None = None,
    tokenizer: Path | None = None,
    quantiser: Quantiser | None = None,
) -> list[Path]:
    """Write config, weights and tokenizer to `out`, which must be new or empty; return the files written.

    `tensors` are full tensors under the model's own names, in any order; a tied one may come under any of its names.
    A tensor may be held until its file is written, so its memory must not be reused for the next.
    Floating-point tensors are cast to `dtype` (None: unchanged). `tied` maps a tied name to the one stored,
    read from the model by default; `skeleton` is the model on the meta device, built from `config` by default.
    `quantiser` stores linear layers and experts as codes.
    """
    require_free(out)
    model = skeleton if skeleton is not None else skeleton_of(config)
    if has_scalar_head(config):
        config, tensors = classifier_config(config), classifier_tensors(tensors, model.state_dict().keys())
    stream = StoredStream(model, dtype=dtype, tied=tied, quantiser=quantiser)
    with committed_folder(out) as folder:
        writer = ShardWriter(folder, max_shard_bytes=max_shard_bytes)
        for name, tensor in stream.stored(tensors):
            writer.add(name, tensor)
        writer.finish()
        _write_config(config, model, folder, dtype=dtype or stream.main_dtype(), quantiser=quantiser)
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, folder)
    return sorted(out.iterdir())


class StoredStream:
    """Turns the model's tensors into stored ones: resolves ties, casts, checks, converts unit by unit."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        tied: Mapping[str, str] | None = None,
        quantiser: Quantiser | None = None,
    ) -> None:
        self._tied = stored_ties(model) if tied is None else tied
        self._dtype = dtype
        self._quantiser = quantiser
        self._codes = quantiser.model_names if quantiser is not None else frozenset[str]()
        self._keep = _kept_in_fp32(model, dtype)
        self._shapes = {name: value.shape for name, value in saved_tensors(model).items()}
        self._awaited = {self._stored_name(name) for name in unique_names(model)}
        self._plan = SavePlan.build(model, self._awaited)
        self._waiting: dict[str, torch.Tensor] = {}  # of incomplete units
        self._num_values: Counter[torch.dtype] = Counter()

    def stored(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for given, tensor in tensors:
            name = self._stored_name(given)
            if name in self._awaited:
                self._awaited.remove(name)
                yield from self._quantised(self._converted(name, self._cast(name, tensor)))
            elif name not in self._shapes:
                raise WeightsError(
                    f"the model has no tensor {given!r} to export", hint="names are those of named_parameters"
                )
        if self._awaited:
            raise WeightsError(
                f"the export lacks {len(self._awaited)} tensors, {min(self._awaited)!r} among them",
                hint="every parameter and persistent buffer of the model must be given",
            )

    def main_dtype(self) -> torch.dtype:
        """The most common floating dtype, which config.json records and from_pretrained loads into."""
        return self._num_values.most_common(1)[0][0] if self._num_values else torch.float32

    def _stored_name(self, name: str) -> str:
        return self._tied.get(name, name)

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != self._shapes[name]:
            found, wanted = list(tensor.shape), list(self._shapes[name])
            raise WeightsError(
                f"{name!r} is {found}, but {wanted} in the model", hint="export full tensors, not shards"
            )
        tensor = tensor.detach().to("cpu")
        if not tensor.is_floating_point():
            return tensor
        if name in self._codes:  # rounded once, from the values given
            return tensor
        if self._dtype is not None:
            keep = any(re.search(rule, name) for rule in self._keep)
            tensor = tensor.to(torch.float32 if keep else self._dtype)
        self._num_values[tensor.dtype] += tensor.numel()
        return tensor

    def _converted(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if self._plan is None:
            yield name, tensor
            return
        self._waiting[name] = tensor
        unit = self._plan.unit(name)
        if unit <= self._waiting.keys():
            yield from self._plan.convert({one: self._waiting.pop(one) for one in unit})

    def _quantised(self, stored: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._quantiser is None:
            yield from stored
            return
        for name, tensor in stored:
            yield from self._quantiser.tensors(name, tensor, scale_dtype=self._dtype or tensor.dtype)


def _kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype | None) -> list[str]:
    """Patterns of names that from_pretrained loads in float32 whatever `dtype` is; cast, they would lose bits."""
    # no public name for this exists; the test with deepseek_v3 in bfloat16 fails when it moves
    plan = model._get_dtype_plan(dtype) if dtype is not None else {}
    return [pattern.replace("*", ".*") for pattern in plan]


def is_kept_in_fp32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether from_pretrained loads this parameter in float32 whatever `dtype` is."""
    return any(re.search(rule, name) for rule in _kept_in_fp32(model, dtype))


def skeleton_of(config: PretrainedConfig) -> PreTrainedModel:
    """The model for names, shapes and ties only: parameters and buffers have no values."""
    is_scalar = has_scalar_head(config)
    kind = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(
            classifier_config(config) if is_scalar else copy.deepcopy(config),
            attn_implementation="eager",
            trust_remote_code=False,
        )
    return model


def _write_config(
    config: PretrainedConfig,
    model: PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype,
    quantiser: Quantiser | None = None,
) -> None:
    written = copy.deepcopy(config)
    if quantiser is not None:
        written.quantization_config = quantiser.config()
    written.architectures = [type(model).__name__]
    written.dtype = str(dtype).removeprefix("torch.")
    written.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    files = {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}
    if not files:
        raise TokenizerError(
            f"there are no tokenizer files in {source}", hint="give the folder that holds tokenizer.json"
        )
    for file in files:
        shutil.copyfile(file, folder / file.name)


def require_free(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise RunFolderError(f"{out} is not empty", hint="give a new folder; an export never overwrites one")
    if out.exists() and not out.is_dir():
        raise RunFolderError(f"{out} is a file", hint="give a new folder")


@contextmanager
def committed_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` if the block succeeds, and is removed otherwise."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())  # mkdtemp creates folders that only their owner may read
        for file in folder.iterdir():
            sync_path(file)
        sync_path(folder)
        require_free(out)
        folder.replace(out)
        sync_path(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
