"""`shape_of`: a parsed config.json in, a `ModelShape` out; also from a path, and from a type with overrides (run.toml).

A shape is derived once (`derive`, which imports torch) and then read from a cache, keyed by the config, the version of
transformers and the code that derives. Of a multimodal config that transformers has no causal LM for, the language
model is read, and a note says so. A type unknown to transformers is counted as a known one with its keys.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weft.core.adapter_spec import AdapterSpec
from weft.core.errors import BadValueError, ModelError
from weft.core.json_files import read_json_table
from weft.core.model_shape import ModelShape
from weft.core.shape_json import shape_from_json, shape_to_json

MOST_LAYERS = 10_000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
# types whose code lives outside transformers, or in the text part of a multimodal model -> the type they are built like
_LIKE = {
    "kimi_k2": "deepseek_v3", "internlm": "llama", "internlm2": "llama", "internlm3": "llama", "baichuan": "llama",
    "minicpm": "llama", "skywork": "llama", "xverse": "llama", "aquila": "llama", "Yi": "llama", "yi": "llama",
    "RefinedWeb": "falcon", "RefinedWebModel": "falcon", "stablelm_epoch": "stablelm", "deepseek": "deepseek_v2",
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen2_5_omni_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe", "qwen3_omni_moe_text": "qwen3_moe", "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe", "phi4_multimodal": "phi3",
}  # fmt: skip
_OLD_KEYS = {"n_head": "num_attention_heads", "n_head_kv": "num_kv_heads", "n_layer": "num_hidden_layers"}
_GUESSABLE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


def shape_of(config: Mapping[str, Any], *, name: str = "", adapter: AdapterSpec | None = None) -> ModelShape:
    """The sizes of the causal LM that transformers builds from a parsed config.json, and of its adapters."""
    _require_plausible(config)
    file = _cache_file(config, adapter)
    shape = _read(file)
    if shape is None:
        shape = _derived(config) if adapter is None else _adapted(config, adapter)
        _write(file, shape)
    return replace(shape, name=name or shape.model_type)


def shape_from_type(
    model_type: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    adapter: AdapterSpec | None = None,
) -> ModelShape:
    """A type with some config values, as [model] of run.toml has it; the others are transformers' defaults."""
    return shape_of({**(overrides or {}), "model_type": model_type}, name=name, adapter=adapter)


def shape_from_path(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    adapter: AdapterSpec | None = None,
) -> ModelShape:
    """A config.json, or a folder that holds one; `overrides` as [model.config] of run.toml has them."""
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    config = read_json_table(file, hint="give a Hugging Face config.json or a folder that holds one")
    return shape_of(_overridden(config, overrides or {}), name=name or file.parent.name, adapter=adapter)


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A part (text_config) is changed, not replaced; a value of its own goes before those of older names."""
    merged = {key: value for key, value in config.items() if key not in overrides}
    for key, value in overrides.items():
        own = config.get(key)
        merged[key] = _overridden(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return merged


def _require_plausible(config: Mapping[str, Any]) -> None:
    """Refuse a text_config that is no table, and a mistyped number of layers: a billion modules would be built."""
    text = config.get("text_config", {})
    if not isinstance(text, Mapping | None):
        raise ModelError(
            f"text_config of the {config.get('model_type')!r} config is {text!r}, not an object",
            hint="correct text_config",
        )
    for table in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in _LAYERS:
            layers = table.get(key)
            if isinstance(layers, int | float) and layers > MOST_LAYERS:
                raise BadValueError(f"{key} is {layers:,}, more than {MOST_LAYERS:,}", hint=f"correct {key}")


# ------------------------------------------------------------------------------------------------------------ the cache


def _cache_file(config: Mapping[str, Any], adapter: AdapterSpec | None) -> Path:
    text = json.dumps(config, sort_keys=True, default=str) + (adapter.model_dump_json() if adapter is not None else "")
    digest = hashlib.sha256(f"{_code_digest()} {text}".encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "shapes"
    return folder / f"{digest[:32]}.json"


@cache
def _code_digest() -> str:
    """Digest of the code that derives shapes: a changed rule must not find what an older one wrote."""
    weft = Path(__file__).parents[2]
    files = [*weft.glob("models/**/*.py"), *weft.glob("zoo/*.py"), weft / "core" / "model_shape.py"]
    digest = hashlib.sha256(version("transformers").encode())
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> ModelShape | None:
    try:
        return shape_from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, LookupError):  # missing, or cut short by a kill: derived again
        return None


def _write(file: Path, shape: ModelShape) -> None:
    scratch = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(shape_to_json(shape)), encoding="utf-8")
        scratch.replace(file)
    except OSError:  # a read-only home: derived again next time
        return


# ----------------------------------------------------------------------------------------------------------- derivation


def _derived(config: Mapping[str, Any]) -> ModelShape:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    model_type = config.get("model_type", "")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError("the config has no model_type", hint="give a Hugging Face config.json with its model_type")
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return _of_known_type(model_type, config)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        shape = _derived({"model_type": "", **text})
        note = f"only the language model of {model_type!r} is counted, not its other towers"
        return replace(shape, is_exact=False, notes=(*shape.notes, note))
    return _guess(model_type, config, known=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _adapted(config: Mapping[str, Any], adapter: AdapterSpec) -> ModelShape:
    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    return _of_known_type(str(config.get("model_type", "")), config, adapter)


def _of_known_type(model_type: str, config: Mapping[str, Any], adapter: AdapterSpec | None = None) -> ModelShape:
    from weft.models.hf_config import config_from_table
    from weft.models.shape.derive import derive_shape

    try:
        shape = derive_shape(config_from_table(model_type, config), adapter=adapter)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        # values that the constructor accepts and that make no model: no stack trace, whatever a config holds
        raise ModelError(
            f"the {model_type!r} config describes no model: {error}",
            hint="compare the config with one that transformers builds",
        ) from error
    return replace(shape, model_type=model_type)


def _guess(model_type: str, config: Mapping[str, Any], *, known: Mapping[str, Any]) -> ModelShape:
    """Count a type that is like a known one, or that has Llama's (or Mixtral's) keys, as that one; a note says so."""
    like = _LIKE.get(model_type, "")
    if not like:
        if any(config.get(key) is None for key in _GUESSABLE):
            raise _unknown(model_type, known)
        is_moe = config.get("num_experts") is not None and config.get("num_experts_per_tok") is not None
        like = "mixtral" if is_moe else "llama"
    renamed = {_OLD_KEYS.get(key, key) if like == "falcon" else key: value for key, value in config.items()}
    shape = _of_known_type(like, {**renamed, "model_type": like})
    note = f"transformers has no {model_type!r} model: it is counted as if it were {like!r}"
    return replace(shape, model_type=model_type, is_exact=False, notes=(*shape.notes, note))


def _unknown(model_type: str, known: Mapping[str, Any]) -> ModelError:
    import difflib

    near = difflib.get_close_matches(model_type, list(known), n=3, cutoff=0.4)
    hint = f"the nearest known types are {', '.join(near)}" if near else "give a causal LM of transformers"
    return ModelError(f"{model_type!r} is not a causal LM of the installed transformers", hint=hint)
