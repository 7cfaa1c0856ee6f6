"""The positions that a model has: rows of a table of positions, and what its rotary embedding was scaled for.

A table has no row for a further position; rotary embeddings compute any, but weights were not trained there.

| rotary type                    | positions                                                                       |
| ------------------------------ | ------------------------------------------------------------------------------- |
| `dynamic`                      | follow the longest position of a forward                                        |
| `longrope`                     | two tables: one up to the original length, one for forwards with any position   |
|                                | beyond                                                                          |
| `linear`, `yarn`, `llama3`     | a factor times the original length                                              |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from weft.core.data_spec import DataSpec
from weft.core.run_spec import ModelSpec, RunSpec
from weft.models.build import build_config, build_skeleton
from weft.models.small_config import stored_key

POSITION_KEYS = ("n_positions", "max_position_embeddings")
_FEW_TOKENS = 64  # of a model that takes its tokenizer's vocabulary
_SCALED_FROM = "original_max_position_embeddings"


def check_positions(run: RunSpec) -> list[tuple[str, str]]:
    """Reasons against the length of the run's rows, as (sentence, hint)."""
    config, length = build_config(run.model, vocab_size=_FEW_TOKENS), run.data.sequence_length
    key = stored_key(config.get_text_config(), POSITION_KEYS)
    limit = getattr(config.get_text_config(), key) if key else 0
    if key and length > limit and has_position_table(run.model, key, vocab_size=_FEW_TOKENS):
        hint = f"set data.sequence_length = {limit}" if run.model.path else f"set model.config.{key} = {length}"
        return [
            (f"rows of {length:,} tokens are longer than the {limit:,} positions of the model's table ({key})", hint)
        ]
    return switching_reasons(run.data, config)


def switching_reasons(data: DataSpec, config: Any) -> list[tuple[str, str]]:
    """Reasons against packed documents of a model with this config, as (sentence, hint)."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    following = [each for each in _lengths_that_switch(text) if data.sequence_length > each] if text else []
    if not data.isolates or not following:
        return []
    return [
        (
            f"the model's rotary embedding changes for a whole micro-batch when one of its documents has more than "
            f"{min(following):,} tokens, so packed documents would get other numbers in other layouts",
            f"set data.sequence_length = {min(following)}, or data.packing = 'none'",
        )
    ]


def note_on_positions(run: RunSpec, config: Any) -> str:
    """A warning of rows beyond the positions that the model's rotary embedding was made for, or ""."""
    text, length = config.get_text_config(), run.data.sequence_length
    limit = rotary_limit(text)
    if not limit or length <= limit:
        return ""
    reach = f"rows of {length:,} tokens reach positions beyond the {limit:,} of the model's config"
    scaling = f"max_position_embeddings = {length} and a scaling in rope_parameters (rope_type = 'yarn', factor)"
    return f"{reach}; weights were not trained there unless [model.config] sets {scaling}"


def rotary_limit(config: Any) -> int:
    """Positions that a rotary embedding was made or scaled for; 0: it has none, or the config does not say."""
    scalings = list(_scalings(config))
    positions = getattr(config, "max_position_embeddings", None)
    if not scalings or not isinstance(positions, int):
        return 0
    scaled = [int(each.get(_SCALED_FROM) or positions) * (each.get("factor") or 1) for each in scalings]
    return int(max(positions, *scaled))


def has_position_table(model: ModelSpec, key: str, *, vocab_size: int) -> bool:
    """Whether `key` is the size of a table: with one position fewer, some tensor has one row fewer."""
    shapes = []
    for fewer in (0, 1):
        config = build_config(model, vocab_size=vocab_size)
        text = config.get_text_config()
        setattr(text, key, getattr(text, key) - fewer)
        skeleton = build_skeleton(config)
        tensors = (*skeleton.named_parameters(), *skeleton.named_buffers())
        shapes.append({name: tuple(tensor.shape) for name, tensor in tensors})
    return any(
        one == other + 1
        for name, shape in shapes[0].items()
        for one, other in zip(shape, shapes[1].get(name, ()), strict=False)
    )


def rotaries_that_follow(model: nn.Module) -> Iterator[nn.Module]:
    """Rotary embeddings whose numbers depend on the longest position of a forward."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(map(_follows, kinds.values() if isinstance(kinds, dict) else [kinds])):
            yield module


def _follows(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _lengths_that_switch(config: Any) -> Iterator[int]:
    """The longest rows for which such an embedding is as it was made."""
    for scaling in _scalings(config):
        if _follows(scaling.get("rope_type")):
            yield int(scaling.get(_SCALED_FROM) or getattr(config, _SCALED_FROM, 0) or config.max_position_embeddings)


def _scalings(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of each rotary embedding: one, or one per kind of layer."""
    given = getattr(config, "rope_parameters", None)
    if isinstance(given, dict):
        nested = [each for each in given.values() if isinstance(each, dict)]
        yield from nested or [given]
