"""`shape_of`: a parsed config.json in, a `ModelShape` out; also from a path, and from a type with overrides (run.toml).

Not a reader of weights. `model_type` decides the family; of a multimodal config the language model is read, and a note
says so; an unknown type is guessed as a Llama where the config has Llama's keys (is_exact = False), else refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core.errors import ModelError
from weft.core.json_files import read_json_table
from weft.core.model_shape import ModelShape
from weft.zoo.config import Config, type_data, with_defaults
from weft.zoo.families import find, known_types
from weft.zoo.family import Family, build_shape

# types whose code lives outside transformers, or in the text part of a multimodal model -> the type they are built like
_LIKE = {
    "kimi_k2": "deepseek_v3", "internlm": "llama", "internlm2": "llama", "internlm3": "llama", "baichuan": "llama",
    "minicpm": "llama", "skywork": "llama", "xverse": "llama", "aquila": "llama", "Yi": "llama", "yi": "llama",
    "RefinedWeb": "falcon", "RefinedWebModel": "falcon", "stablelm_epoch": "stablelm", "deepseek": "deepseek_v2",
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen2_5_omni_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe", "qwen3_omni_moe_text": "qwen3_moe", "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe", "phi4_multimodal": "phi3",
}  # fmt: skip
_GUESSABLE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


def shape_of(config: Mapping[str, Any], *, name: str = "") -> ModelShape:
    """The sizes of the causal LM that transformers would build from `config`."""
    model_type = str(config.get("model_type", ""))
    family = find(model_type)
    if family is not None:
        shape = _build(family, with_defaults(model_type, config), name=name)
        return _uneven(shape) if config.get("per_layer_config") else shape
    nested = _nested_text(model_type, config)
    if nested is not None:
        shape = shape_of(nested, name=name)
        if type_data(model_type).get("text_only"):
            return shape
        note = f"only the language model of {model_type!r} is counted, not its other towers"
        return replace(shape, is_exact=False, notes=(*shape.notes, note))
    return _guess(model_type, config, name=name)


def shape_from_type(model_type: str, overrides: Mapping[str, Any] | None = None, *, name: str = "") -> ModelShape:
    """A type with some config values, as [model] of run.toml has it; the others are transformers' defaults."""
    return shape_of({**(overrides or {}), "model_type": model_type}, name=name)


def from_path(path: str | Path, overrides: Mapping[str, Any] | None = None, *, name: str = "") -> ModelShape:
    """A config.json, or a folder that holds one; `overrides` as [model.config] of run.toml has them."""
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    config = read_json_table(file, hint="give a Hugging Face config.json or a folder that holds one")
    return shape_of(_overridden(config, overrides or {}), name=name or file.parent.name)


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A part (text_config) is changed, not replaced; a value of its own goes before those of older names."""
    merged = {key: value for key, value in config.items() if key not in overrides}
    for key, value in overrides.items():
        own = config.get(key)
        merged[key] = _overridden(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return merged


def _build(family: Family, config: Config, *, name: str) -> ModelShape:
    try:
        return build_shape(family, config, name=name)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # a list where a number belongs, a table where a list does: whatever a config may hold, no stack trace
        raise ModelError(
            f"the {config.model_type!r} config has a value of the wrong kind: {error}",
            hint="compare the config with one that transformers builds",
        ) from error


def _uneven(shape: ModelShape) -> ModelShape:
    note = "per_layer_config is not read: every layer of a kind is counted with the sizes of the whole model"
    return replace(shape, is_exact=False, notes=(*shape.notes, note))


def _nested_text(model_type: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    entry = type_data(model_type)
    key = entry.get("nested", "text_config")
    if not entry.get("text") and not isinstance(config.get(key), Mapping):
        return None
    text = config.get(key) or {}
    if not isinstance(text, Mapping):
        raise ModelError(f"{key} of the {model_type!r} config is {text!r}, not an object", hint=f"correct {key}")
    # the head is tied or not by the outer config, where it says so
    outer = {k: config[k] for k in ("tie_word_embeddings",) if k in config and k not in text}
    own = {} if text else entry.get("text_defaults", {})
    return {"model_type": entry.get("text", ""), **own, **text, **outer}


def _guess(model_type: str, config: Mapping[str, Any], *, name: str) -> ModelShape:
    """A type that is like a known one, or that has Llama's (or Mixtral's) keys, is counted as that one and says so."""
    like = _LIKE.get(model_type, "")
    values = with_defaults(model_type if type_data(model_type) else like, config)
    if not like:
        if any(values.get(key) is None for key in _GUESSABLE):
            raise _unknown(model_type)
        is_moe = values.get("num_experts") is not None and values.get("num_experts_per_tok") is not None
        like = "mixtral" if is_moe else "llama"
    family = find(like)
    if family is None:
        raise _unknown(model_type)
    shape = _build(family, values, name=name or model_type)
    note = f"the sizes of {model_type!r} are not known: it is counted as if it were {like!r}"
    return replace(shape, model_type=model_type, is_exact=False, notes=(*shape.notes, note))


def _unknown(model_type: str) -> ModelError:
    if not model_type:
        return ModelError("the config has no model_type", hint="give a Hugging Face config.json with its model_type")
    import difflib

    near = difflib.get_close_matches(model_type, known_types(), n=3, cutoff=0.4)
    hint = (
        f"the nearest known types are {', '.join(near)}" if near else "see the list of known types in the documentation"
    )
    return ModelError(f"{model_type!r} is not a model type weft knows the sizes of", hint=hint)
