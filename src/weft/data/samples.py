"""Samples: rows of chats, prompts with completions, and pairs of preferences, encoded with the tokens that count.

A `SampleEncoder` stands where a tokenizer stands for text: `building` gives it documents (rows as JSON), and it gives
words (`words`). A pair becomes two samples, the chosen one first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.data_spec import DataSpec
from weft.core.errors import DataError, TokenizerError
from weft.core.vocabulary import BYTES
from weft.data.chat import ChatRenderer, EncodedChat, read_conversation, read_messages, read_tools
from weft.data.documents import Document
from weft.data.row_fields import SampleRow
from weft.data.tokenizers import Tokenizer, open_tokenizer
from weft.data.words import Words, to_words

VERSION = 1  # of the rules below: part of the identity of stored samples

Fields = Mapping[str, Any]


class SampleEncoder:
    """Encodes rows of one format."""

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.tokenizer = open_tokenizer(spec.tokenizer or BYTES)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def end_of_document(self) -> int:
        return self.tokenizer.end_of_document

    def identity(self) -> str:
        """Changes with the tokenizer, its template, and what counts; read from files, without loading them."""
        spec = self.spec
        template = read_template(spec.chat_template) if spec.chat_template else self.tokenizer.template_identity()
        text = "\n".join([str(VERSION), spec.format, spec.turns, self.tokenizer.identity(), template])
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def renderer(self) -> ChatRenderer:
        given = read_template(self.spec.chat_template) if self.spec.chat_template else None
        return ChatRenderer(self.tokenizer.backend, name=self.spec.tokenizer or BYTES, template=given)

    def encode_batch(self, documents: Sequence[Document]) -> list[Words]:
        encode = self._encodes[self.spec.format]
        rows = map(SampleRow.from_text, documents)
        return [self._words(chat) for row in rows for chat in encode(row.fields, row.where)]

    @property
    def _encodes(self) -> dict[str, Callable[[Fields, str], list[EncodedChat]]]:
        return {"chat": self._chat, "prompt-completion": self._completion, "preference": self._pair}

    def _words(self, chat: EncodedChat) -> Words:
        return to_words(np.asarray(chat.tokens, dtype=np.int64), chat.counted, vocab_size=self.vocab_size)

    def _chat(self, fields: Fields, where: str) -> list[EncodedChat]:
        if "messages" in fields:
            messages = read_messages(fields["messages"], where=where)
        else:
            messages = read_conversation(fields["conversations"], system=fields.get("system"), where=where)
        tools = read_tools(fields.get("tools"), where=where)
        return [self.renderer.encode_chat(messages, tools=tools, turns=self.spec.turns, where=where)]

    def _completion(self, fields: Fields, where: str) -> list[EncodedChat]:
        return [self._after(fields["prompt"], fields["completion"], "completion", fields, where)]

    def _pair(self, fields: Fields, where: str) -> list[EncodedChat]:
        prompt, answers = fields.get("prompt"), [fields["chosen"], fields["rejected"]]
        if prompt is None:
            prompt, answers = _common_beginning(*answers, where=where)
        names = ("chosen", "rejected")
        return [self._after(prompt, answer, name, fields, where) for name, answer in zip(names, answers, strict=True)]

    def _after(self, prompt: Any, answer: Any, name: str, fields: Fields, where: str) -> EncodedChat:
        """The prompt and its answer, whose tokens count."""
        if isinstance(prompt, str) and isinstance(answer, str):
            return self._text_after(prompt, answer, name, where)
        if isinstance(prompt, str) != isinstance(answer, str):
            raise _bad(where, f"prompt and {name} are not both text, or both messages")
        tools = read_tools(fields.get("tools"), where=where)
        asked = read_messages(prompt, where=where, field="prompt")
        given = read_messages(answer, where=where, field=name)
        before = self.renderer.encode(asked, tools=tools, where=where, is_prompt=True)
        tokens = self.renderer.encode([*asked, *given], tools=tools, where=where)
        if tokens[: len(before)] != before or len(tokens) == len(before):
            raise _bad(where, f"the chat template renders the prompt otherwise when {name} follows")
        return _counted_from(tokens, len(before))

    def _text_after(self, prompt: str, answer: str, name: str, where: str) -> EncodedChat:
        """The prompt has the tokens that it has alone, as it will have when text is generated."""
        for field, text in (("prompt", prompt), (name, answer)):
            if not text:
                raise _bad(where, f"{field} is empty")
        end = self.end_of_document
        before = without_end(self.tokenizer.encode(prompt).tolist(), end)
        tokens = without_end(self.tokenizer.encode(prompt + answer).tolist(), end)
        if tokens[: len(before)] != before:
            tokens = before + without_end(self.tokenizer.encode_text(answer).tolist(), end)
        return _counted_from([*tokens, end], len(before))


def open_encoder(spec: DataSpec) -> Tokenizer | SampleEncoder:
    """The tokenizer of text, or the encoder of another format."""
    return open_tokenizer(spec.tokenizer or BYTES) if spec.format == "text" else SampleEncoder(spec)


def _counted_from(tokens: list[int], begin: int) -> EncodedChat:
    return EncodedChat(tokens=tokens, counted=np.arange(len(tokens)) >= begin)


def without_end(tokens: list[int], end: int) -> list[int]:
    """The tokens without the one that ends a document."""
    return tokens[:-1] if tokens and tokens[-1] == end else tokens


def _common_beginning(chosen: Any, rejected: Any, *, where: str) -> tuple[Any, list[Any]]:
    """The messages that both have, which are the prompt, and what each adds."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise _bad(where, "there is no field prompt, and chosen and rejected are not lists of messages")
    pairs = zip(chosen, rejected, strict=False)
    count = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if count in (0, len(chosen), len(rejected)):
        raise _bad(where, "chosen and rejected do not begin alike and end otherwise")
    return chosen[:count], [chosen[count:], rejected[count:]]


def read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the chat template {path} cannot be read: {error}", hint="data.chat_template names a file with Jinja text"
        ) from None


def _bad(where: str, what: str) -> DataError:
    return DataError(f"{where}: {what}", hint="correct the row, or remove it")
