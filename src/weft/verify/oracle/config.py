"""The Hugging Face config of run.toml, built by transformers only; and the comparison of two configs by field.

weft may set fields that a run does not give: vocab_size, and special tokens that would lie outside of it. Every
other field is the user's, or the family's own default.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.verify.oracle.facts import Tables
from weft.verify.verdict import Check, Finding

NAME, RULE = "oracle config", 12
LEFT_OPEN = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
# fields about saving and running a model
NOT_OF_THE_MODEL = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "_attn_implementation",
    "attn_implementation", "_attn_implementation_internal", "_experts_implementation", "experts_implementation",
    "_commit_hash", "use_cache", "weft_scalar_head",
}  # fmt: skip
Fields = Mapping[str, Any]


def asked_config(model: Tables, run_config: Any) -> Any:
    """The config of `[model]`; fields that it does not give are the run's. Nothing is tied to a scalar head."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = _asked(model, run_config)
    if model["head"] == "scalar":
        for one in (config, config.get_text_config()):
            one.tie_word_embeddings = False
    return config


def _asked(model: Tables, run_config: Any) -> Any:
    from transformers import AutoConfig

    if model.get("path") is not None:
        config = AutoConfig.from_pretrained(str(Path(model["path"]).expanduser()), trust_remote_code=False)
        for key, value in model["config"].items():
            setattr(config, key, value)
        return config
    open_fields = _open_fields(run_config.to_dict(), model["config"])
    return AutoConfig.for_model(model["type"], **_merged(open_fields, model["config"]))


def check_config(asked: Any, built: Any, run_config: Any, *, vocab_size: int) -> Check:
    """Check every field of the run's model config; `built` is the config of a plain model built from `asked`."""
    wrong = first_difference(asked.to_dict(), run_config.to_dict(), built.to_dict())
    if wrong is not None:
        return Check.failed(NAME, wrong)
    text = run_config.get_text_config()
    size = getattr(text, "vocab_size", None)
    if size is not None and size < vocab_size:
        finding = Finding(rule=RULE, expected=f"a vocabulary of at least {vocab_size} tokens", found=str(size))
        return Check.failed(NAME, finding)
    return Check.passed(NAME, f"{len(asked.to_dict())} fields of {type(asked).__name__} as run.toml asks for")


def first_difference(expected: Fields, found: Fields, built: Fields, *, place: str = "") -> Finding | None:
    """The first difference; changes by the constructor itself (a decoder built without its encoder) are in `built`."""
    allowed = {(path, repr(value)) for path, _, value in _differences(expected, built)}
    for path, right, value in _differences(expected, found):
        if (path, repr(value)) in allowed:
            continue
        return Finding(rule=RULE, coordinates=f"{place}config {path}", expected=repr(right), found=repr(value))
    return None


def _differences(expected: Fields, found: Fields, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(set(expected) | set(found)):
        if key in NOT_OF_THE_MODEL:
            continue
        right, value = expected.get(key), found.get(key)
        if isinstance(right, Mapping) and isinstance(value, Mapping):
            yield from _differences(right, value, f"{path}{key}.")
        elif not _same(right, value):
            yield f"{path}{key}", right, value


def _same(right: Any, value: Any) -> bool:
    if isinstance(right, list | tuple) and isinstance(value, list | tuple):
        return len(right) == len(value) and all(_same(one, other) for one, other in zip(right, value, strict=True))
    return bool(right == value) or str(right) == str(value)


def _open_fields(run_fields: Fields, given: Fields) -> dict[str, Any]:
    """The run's values of fields that the user did not give, at the top level and in nested configs."""
    fields: dict[str, Any] = {key: run_fields[key] for key in LEFT_OPEN if key in run_fields and key not in given}
    for key, nested in run_fields.items():
        if key.endswith("_config") and isinstance(nested, Mapping) and "model_type" in nested:
            inside = _open_fields(nested, given.get(key, {}) or {})
            if inside:
                fields[key] = {"model_type": nested["model_type"], **inside}
    return fields


def _merged(first: Fields, second: Fields) -> dict[str, Any]:
    """`first` updated by `second`, nested tables too."""
    merged = copy.deepcopy(dict(first))
    for key, value in second.items():
        is_nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if is_nested else copy.deepcopy(value)
    return merged
