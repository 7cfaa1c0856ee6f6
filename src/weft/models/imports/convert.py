"""Finds out what a checkpoint folder is, and writes it as a Hugging Face folder, one tensor at a time.

folder -> the newest step in it -> named tensors -> whose names? -> a recipe per parameter -> export_folder
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from weft.core.errors import ModelError, WeightsError
from weft.models.hf_config import text_config
from weft.models.hf_export import export_folder, require_free, skeleton_of
from weft.models.imports.deepspeed import MODEL_STATES, UNIVERSAL, UniversalSource, ZeroSource
from weft.models.imports.megatron import is_megatron, megatron_recipes
from weft.models.imports.recipes import ModelFacts, Recipe, Recipes, require_all_used
from weft.models.imports.sources import METADATA, DcpSource, TensorSource
from weft.models.imports.torchtitan import is_torchtitan, torchtitan_recipes
from weft.models.pretrained import saved_tensors, tie_groups, unique_names

_HEADS = ("output.weight", "output_layer.weight")
# files that name the newest step, with the form of its folder
_NEWEST = {"latest_checkpointed_iteration.txt": "iter_{:0>7}", "latest_universal": "{}", "latest": "{}"}


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A folder that holds one step, and its tensors."""

    kind: str  # "DCP", "ZeRO", "universal"
    folder: Path
    source: TensorSource

    @classmethod
    def open(cls, given: Path) -> ForeignCheckpoint:
        folder = newest_step(given)
        if (folder / METADATA).is_file():
            return cls("DCP", folder, DcpSource(folder))
        if (folder / UNIVERSAL).is_dir():
            return cls("universal", folder, UniversalSource(folder))
        if any(folder.glob(MODEL_STATES)):
            return cls("ZeRO", folder, _zero_source(folder))
        if (folder / "mp_rank_00" / "model_optim_rng.pt").is_file() or any(folder.glob("mp_rank_00_*")):
            raise WeightsError(
                f"{folder} is a Megatron checkpoint of its older format, `torch`",
                hint="save it with --ckpt-format torch_dist",
            )
        raise WeightsError(
            f"{given} has no checkpoint that weft reads",
            hint="give a folder of torchtitan or torch DCP (.metadata), Megatron (torch_dist) or DeepSpeed "
            "(*_model_states.pt, or zero/)",
        )


def _zero_source(folder: Path) -> ZeroSource:
    try:
        return ZeroSource(folder)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise WeightsError(
            f"the files of {folder} are not laid out as DeepSpeed's: {type(error).__name__} {error}",
            hint="*_model_states.pt and *_optim_states.pt of one checkpoint, as zero_to_fp32.py reads them",
        ) from error


def newest_step(given: Path) -> Path:
    """The folder of the newest step in `given`, or `given` itself."""
    if not given.is_dir():
        raise WeightsError(f"there is no folder {given}", hint="give the folder of a checkpoint")
    for file, form in _NEWEST.items():
        if (given / file).is_file():
            name = (given / file).read_text(encoding="utf-8").strip()
            return given / (form.format(name) if name != "release" else name)
    if (given / METADATA).is_file():
        return given
    steps = [folder for folder in given.glob("step-*") if (folder / METADATA).is_file()]
    return max(steps, key=lambda folder: int(re.sub(r"\D", "", folder.name) or 0), default=given)


def import_checkpoint(
    given: Path, out: Path, *, config: Any, dtype: torch.dtype | None = None, tokenizer: Path | None = None
) -> dict[str, Any]:
    """Write the newest step of `given` to `out` as a model of `config`; a record of what was written."""
    require_free(out)
    checkpoint = ForeignCheckpoint.open(given)
    model = skeleton_of(config)
    program, recipes = _recipes(checkpoint.source.shapes, model, config)
    _require_tensors(recipes, checkpoint.source.shapes, program=program)
    tensors = _tensors(recipes, checkpoint.source, model)
    files = export_folder(config, tensors, out, skeleton=model, dtype=dtype, tokenizer=tokenizer)
    return {
        "from": str(checkpoint.folder),
        "format": checkpoint.kind,
        "names": program,
        "out": str(out),
        "files": [file.name for file in files],
        "tensors": len(recipes),
    }


def _recipes(shapes: Mapping[str, tuple[int, ...]], model: PreTrainedModel, config: Any) -> tuple[str, Recipes]:
    """Whose names the checkpoint has, and a recipe for each parameter of the model."""
    wanted, facts = unique_names(model), _facts(config)
    if is_torchtitan(shapes):
        program, recipes = "torchtitan", torchtitan_recipes(wanted, shapes, facts)
    elif is_megatron(shapes):
        program, recipes = "Megatron", megatron_recipes(wanted, shapes, facts)
    else:
        return "Hugging Face", _same_names(shapes, model)
    heads = set() if "lm_head.weight" in wanted else {key for key in shapes if key.endswith(_HEADS)}
    ignored = heads | {key for key in shapes if "freqs_cis" in key}
    require_all_used(recipes, set(shapes) - ignored, program=program, model_type=facts.model_type)
    if heads:  # the model has one table: two that differ would lose one
        recipes["model.embed_tokens.weight"] = _one_table(recipes["model.embed_tokens.weight"], min(heads))
    return program, recipes


def _one_table(embedding: Recipe, head: str) -> Recipe:
    def make(table: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if not torch.equal(table, other):
            raise WeightsError(
                f"{embedding.keys[0]!r} and {head!r} differ, but the --config ties them",
                hint="set tie_word_embeddings to false in its config.json",
            )
        return embedding.make(table)

    return Recipe((embedding.keys[0], head), make)


def _same_names(shapes: Mapping[str, object], model: PreTrainedModel) -> Recipes:
    """The model's own names after one prefix: `module.` of DDP, `model.` of a state dict; a tied one by any name."""
    ties = tie_groups(model)
    names = unique_names(model)
    first = sorted(ties.get(names[0], {names[0]}))
    ends = [key.removesuffix(name) for name in first for key in shapes if key == name or key.endswith(f".{name}")]
    if not ends:
        raise WeightsError(
            f"the checkpoint has no {names[0]!r}, and its names are neither torchtitan's nor Megatron's: "
            f"{', '.join(sorted(shapes)[:3])}",
            hint="give the --config of the model that was trained",
        )
    prefix = min(ends, key=len)
    recipes = {}
    for name in names:
        stored = [each for each in (name, *sorted(ties.get(name, ()))) if prefix + each in shapes]
        recipes[name] = Recipe((prefix + (stored[0] if stored else name),))
    known = {prefix + name for name in ties}
    given = {key for key in shapes if key.startswith(prefix) and not key.endswith("inv_freq")}
    require_all_used(recipes, given - known, program="DCP or DeepSpeed", model_type=model.config.model_type)
    return recipes


def _require_tensors(recipes: Recipes, shapes: Mapping[str, object], *, program: str) -> None:
    missing = [(name, key) for name, recipe in recipes.items() for key in recipe.keys if key not in shapes]
    if missing:
        name, key = missing[0]
        raise WeightsError(
            f"the checkpoint ({program} names) has no {key!r} for {name!r}, and {len(missing) - 1} more are missing",
            hint="give the --config of the model that was trained, and the files of all ranks",
        )


def _tensors(recipes: Recipes, source: TensorSource, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters in the order of the tensors they are made of: a stacked one is read once."""
    shapes = {name: tuple(value.shape) for name, value in saved_tensors(model).items()}
    for name, recipe in sorted(recipes.items(), key=lambda item: item[1].keys):
        stored = [source.read(key) for key in recipe.keys]  # two only where an embedding has a copy
        try:
            value = recipe.make(*stored)
        except (RuntimeError, IndexError) as error:
            raise _wrong_shape(name, recipe, list(stored[0].shape), list(shapes[name])) from error
        if tuple(value.shape) != shapes[name]:
            raise _wrong_shape(name, recipe, list(stored[0].shape), list(shapes[name]))
        yield name, value.clone()


def _wrong_shape(name: str, recipe: Recipe, found: list[int], wanted: list[int]) -> WeightsError:
    return WeightsError(
        f"{recipe.keys[0]!r} of the checkpoint is {found}, which does not give {name!r} of {wanted}",
        hint="the --config is of another size than the model that was trained",
    )


def _facts(config: Any) -> ModelFacts:
    text = text_config(config)
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise ModelError(
            f"the config of a {config.model_type} has no num_attention_heads", hint="give another --config"
        )
    return ModelFacts(
        model_type=str(config.model_type),
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
    )
