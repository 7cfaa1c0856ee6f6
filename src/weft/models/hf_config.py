"""Hugging Face configs from a type or a folder, with the overrides of `[model.config]`. No model is built here.

One rule decides about keys (`config_keys`): a key is accepted if the class declares it or transformers' code reads it.
Any other key is an error in `[model.config]`, and a note in a config.json, since published files carry leftovers of
other programs.
"""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.core.errors import ModelError
from weft.core.json_files import read_json_table
from weft.models.config_keys import ROPE_KEYS, constructor_keys, known_keys, parts_of
from weft.zoo.hub import CONFIG_NAME

# unread keys that are no misspellings: files of other programs and older versions have them
_FREE_TEXT = ("_", "auto_map")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NEAR = 0.5  # for a hint on an override, which is an error in any case
_SURELY_NEAR = 0.85  # for a key of config.json: only a likely misspelling is reported


def config_from_type(model_type: str, overrides: Mapping[str, Any]) -> Any:
    """The class's defaults with `overrides`, through its constructor."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), n=3)
        raise ModelError(
            f"{model_type!r} is not a causal LM type of the installed transformers",
            hint=f"did you mean {', '.join(near)}?" if near else "for example llama, qwen3, gpt2, mixtral",
        )
    cls = CONFIG_MAPPING[model_type]
    if not overrides:
        return _default(cls)
    _require_known(_default(cls), overrides, extra=constructor_keys(cls))
    return _checked(cls, lambda: cls(**copy.deepcopy(dict(overrides))))


def config_from_table(model_type: str, table: Mapping[str, Any]) -> Any:
    """The config of a parsed config.json; unknown keys are kept, as transformers keeps them.

    Special tokens beyond a small vocabulary are dropped, as `with_vocabulary` drops them for training.
    """
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    config = _checked(cls, lambda: cls.from_dict(copy.deepcopy(dict(table))))
    text = text_config(config)
    rows = getattr(text, "vocab_size", None)
    for key in _SPECIAL_TOKENS:
        token = getattr(text, key, None)
        if isinstance(token, int) and isinstance(rows, int) and token >= rows:
            _checked(cls, lambda key=key: setattr(text, key, None if _accepts(type(text), key, None) else rows - 1))
    return config


def config_from_folder(folder: Path, overrides: Mapping[str, Any], *, name: str) -> Any:
    """The config of config.json with `overrides`; a sub-config (text_config) is updated, not replaced."""
    from transformers import AutoConfig

    _require_own_code(folder, name=name)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # config classes validate with exceptions of their own libraries
        raise ModelError(
            f"the config of {name} cannot be read: {sentence(error)}", hint="give a folder with config.json"
        ) from None
    _require_known(config, overrides)
    return _checked(type(config), lambda: _with_values(config, overrides))


def with_vocabulary(model_type: str, overrides: dict[str, Any], *, vocab_size: int, end: int | None) -> dict[str, Any]:
    """`overrides` plus vocab_size and special token ids inside it, in the text config if there is one."""
    config = config_from_type(model_type, {})
    text = text_config(config)
    nested = next((key for key, value in vars(config).items() if value is text and text is not config), None)
    if nested is None or "vocab_size" in config.to_dict():
        overrides.setdefault("vocab_size", vocab_size)
        return {**overrides, **_special_tokens(config, overrides, end)}
    given = overrides.get(nested, {})
    if not isinstance(given, Mapping):
        raise ModelError(f"{nested} of [model.config] is {given!r}, not a table", hint=f"{nested} = {{ ... }}")
    inside = {"model_type": text.model_type, "vocab_size": vocab_size, **given}
    return {**overrides, nested: {**inside, **_special_tokens(text, inside, end)}}


def _special_tokens(config: Any, overrides: dict[str, Any], end_of_document: int | None) -> dict[str, Any]:
    """Replace default begin, end and padding ids that lie outside a small vocabulary."""
    replaced: dict[str, Any] = {}
    if not isinstance(overrides["vocab_size"], int):
        return replaced  # the config class raises an error that names it
    for key in _SPECIAL_TOKENS:
        default, last = getattr(config, key, None), overrides["vocab_size"] - 1
        if key not in overrides and isinstance(default, int) and default > last:
            replaced[key] = end_of_document if key == "eos_token_id" else None
            if replaced[key] is None and not _accepts(type(config), key, None):
                replaced[key] = last  # rarely a real token: the vocabulary was rounded up
    return replaced


def _accepts(cls: type, key: str, value: Any) -> bool:
    try:
        cls(**{key: value})
    except Exception:  # config classes validate with exceptions of their own libraries
        return False
    return True


def unread_keys(folder: Path, config: Any) -> list[str]:
    """One sentence for each key of the folder's config.json that no code reads and that looks misspelt."""
    cls = type(config)
    try:
        fresh = _default(cls)  # `config` holds every key of the file, misspelt ones too
    except ModelError:
        return []  # a class without defaults has nothing to compare with
    found = _unknown(fresh, read_json_table(folder / CONFIG_NAME), extra=constructor_keys(cls))
    return [
        f"config.json has {key!r}, which nothing reads: did you mean {near!r}?"
        for key, near in ((key, _nearest(key, known, cutoff=_SURELY_NEAR)) for key, known in found)
        if near and not key.startswith(_FREE_TEXT)
    ]


def text_config(config: Any) -> Any:
    """The text config inside a config, or the config itself."""
    try:
        return config.get_text_config()
    except ValueError:
        raise ModelError(
            f"a {config.model_type!r} model has several text parts, so it is not a plain causal LM",
            hint="train one of its parts, or pass the module and an objective to weft.Engine",
        ) from None


def sentence(error: Exception) -> str:
    """The message of another library's exception, on one line: the reason is often in its second line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def _require_own_code(folder: Path, *, name: str) -> None:
    """Refuse a type that only code inside the folder defines: weft never runs that code."""
    from transformers import CONFIG_MAPPING

    fields = read_json_table(folder / CONFIG_NAME)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str | None):
        raise ModelError(f"model_type of {name} is {model_type!r}, not a name", hint="correct its config.json")
    if isinstance(fields.get("auto_map"), dict) and model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{name} is a {model_type!r} model, whose code is Python inside its own folder (auto_map),"
            " and weft does not run code from a model folder",
            hint="trust_remote_code is always false; build the model yourself and pass it to weft.Engine",
        )


def _default(cls: Any) -> Any:
    try:
        return cls()
    except Exception as error:  # config classes validate with exceptions of their own libraries
        raise ModelError(
            f"{cls.__name__} has no default to start from: {sentence(error)}", hint="give model.path, a folder"
        ) from None


def _checked(cls: type, build: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # older names of rotary parameters, which configs still use
            return build()
    except Exception as error:  # as above
        raise ModelError(
            f"{cls.__name__} refuses these values: {sentence(error)}", hint="check [model.config]"
        ) from None


def _require_known(config: Any, overrides: Mapping[str, Any], *, extra: frozenset[str] = frozenset()) -> None:
    """Raise on an unknown key, which transformers would silently ignore."""
    for key, known in _unknown(config, overrides, extra=extra):
        raise ModelError(
            f"{_owner(config, key)} has no {key!r}, and no model code reads it", hint=_hint(config, key, known)
        )


def _unknown(config: Any, table: Mapping[str, Any], *, extra: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """(key, known keys at its level) for each key that no code reads; keys of sub-configs have a dot."""
    parts, known = parts_of(config), None
    for key, value in table.items():
        if key in parts and isinstance(value, Mapping):
            part = _of_type(parts[key], value.get("model_type"))
            inner = _unknown(part, value, extra=constructor_keys(type(part)))
            yield from ((f"{key}.{name}", names) for name, names in inner)
        elif key not in config.to_dict():  # parsing sources takes a second: undeclared keys only
            known = known if known is not None else known_keys(config) | extra
            if key not in known:
                yield key, known


def _of_type(part: Any, model_type: Any) -> Any:
    """The sub-config, or the defaults of another type that may replace it."""
    from transformers import CONFIG_MAPPING

    is_other = isinstance(model_type, str) and model_type != part.model_type and model_type in CONFIG_MAPPING
    return _default(CONFIG_MAPPING[model_type]) if is_other else part


def _owner(config: Any, key: str) -> str:
    for part in key.split(".")[:-1]:
        config = getattr(config, part)
    return type(config).__name__


def _hint(config: Any, key: str, known: frozenset[str]) -> str:
    home = next((part for part, inner in parts_of(config).items() if key in inner.to_dict()), None)
    if home is not None:
        return f"it belongs to a sub-config: config = {{ {home} = {{ {key} = ... }} }}"
    near = _nearest(key, known, cutoff=_NEAR)
    return f"did you mean {near!r}?" if near else "see the HF config's fields"


def _nearest(key: str, known: frozenset[str], *, cutoff: float) -> str | None:
    near = difflib.get_close_matches(key.rpartition(".")[2], sorted(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def _with_values(config: Any, overrides: Mapping[str, Any]) -> Any:
    for key, value in overrides.items():
        part = parts_of(config).get(key)
        if part is not None and isinstance(value, Mapping):
            _with_values(part, value)
        elif key in ROPE_KEYS | {"rope_parameters"} and getattr(config, "rope_parameters", None) is not None:
            _set_rope(config, key, value)
        else:
            setattr(config, key, value)
    return config


def _set_rope(config: Any, key: str, value: Any) -> None:
    """Write rotary values into rope_parameters: no code reads them as separate attributes."""
    table = config.rope_parameters
    kinds = [kind for kind, inner in table.items() if isinstance(inner, dict)]
    if kinds and not (isinstance(value, Mapping) and set(kinds) <= value.keys()):
        raise ValueError(f"{key} has a value for each kind of layer: rope_parameters = {{ {kinds[0]} = {{ ... }} }}")
    if isinstance(value, Mapping):
        theta = {name: table[name] for name in ("rope_theta",) if name in table}
        config.rope_parameters = {**theta, **copy.deepcopy(dict(value))}
        config.standardize_rope_params()
        return
    table[key] = value
    if hasattr(config, key):
        setattr(config, key, value)
