"""A tokenizer.json as the fields of a GGUF file: byte-level BPE (`gpt2` there), the byte tokenizer among it.

Readers choose the rule that splits text before merging by a name; rules without a name that is known here are not
written. Sentencepiece vocabularies are not written either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # gguf.TokenType

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA_3 = _WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NAMES = {_LLAMA_3: "llama-bpe", _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}


@dataclass(frozen=True)
class GgufTokenizer:
    """`pre` names the rule that splits text; a token per id of the model."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    end: int | None
    begin: int | None
    adds_begin: bool


class NoGgufTokenizerError(Exception):
    """Why a tokenizer is not written, as a clause about it."""


def gguf_tokenizer(fields: Mapping[str, Any], config: Mapping[str, Any], *, vocab_size: int) -> GgufTokenizer:
    """From the contents of tokenizer.json and tokenizer_config.json."""
    model = fields["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise NoGgufTokenizerError("it is not a byte-level BPE")
    if fields.get("normalizer") not in (None, {"type": "NFC"}):
        raise NoGgufTokenizerError("it normalises text")
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", [])]
    pre = _pre(fields.get("pre_tokenizer"), has_merges=bool(merges))
    ids = {id_: (token, _NORMAL) for token, id_ in model["vocab"].items()}
    for added in fields.get("added_tokens", []):
        ids[added["id"]] = (added["content"], _CONTROL if added.get("special") else _USER_DEFINED)
    if max(ids) >= vocab_size:
        raise NoGgufTokenizerError(f"it has {max(ids) + 1} tokens, and the model has {vocab_size}")
    spare = [id_ for id_ in range(vocab_size) if id_ not in ids]
    ids |= {id_: (f"[PAD{id_}]", _UNUSED) for id_ in spare}
    if not merges:
        merges = _unused_merge(ids, spare)
    special = {name: _special(config.get(f"{name}_token"), ids) for name in ("eos", "bos")}
    return GgufTokenizer(
        pre=pre,
        tokens=[ids[id_][0] for id_ in range(vocab_size)],
        types=[ids[id_][1] for id_ in range(vocab_size)],
        merges=merges,
        end=special["eos"],
        begin=special["bos"],
        adds_begin="TemplateProcessing" in str(fields.get("post_processor")) and special["bos"] is not None,
    )


def _pre(rule: Any, *, has_merges: bool) -> str:
    steps = rule.get("pretokenizers", []) if rule and rule["type"] == "Sequence" else [rule or {}]
    if not steps or steps[-1].get("type") != "ByteLevel":
        raise NoGgufTokenizerError("it is not a byte-level BPE")
    if not has_merges:
        return "default"  # without merges every split gives the same tokens
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return "gpt-2"
    patterns = [step.get("pattern", {}).get("Regex", "") for step in steps[:-1]]
    name = _NAMES.get(patterns[0]) if len(patterns) == 1 else None
    if name is None:
        raise NoGgufTokenizerError("the rule by which it splits text has no name in GGUF that weft knows")
    return name


def _unused_merge(ids: dict[int, tuple[str, int]], spare: list[int]) -> list[str]:
    """Merges that no text has, of bytes that UTF-8 does not have: readers take no vocabulary without two of them."""
    known = {text for text, _ in ids.values()}
    if len(spare) < 2 or not {"þ", "ÿ"} <= known:  # the letters of bytes 254 and 255
        raise NoGgufTokenizerError("it has no merges")
    ids |= {id_: (text, _NORMAL) for id_, text in zip(spare, ("þÿ", "ÿþ"), strict=False)}
    return ["þ ÿ", "ÿ þ"]


def _special(token: Any, ids: Mapping[int, tuple[str, int]]) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return next((id_ for id_, (known, _) in ids.items() if known == text), None)
