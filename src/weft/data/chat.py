"""Chats: the messages of a row, rendered by the tokenizer's chat template, and which tokens an assistant wrote.

Two ways to the mask. A template with `{% generation %}` marks says it itself. Otherwise the chat is rendered up to each
assistant turn and up to its end: the tokens between count. Every prefix must give the first tokens of the full chat, or
the row is an error: a mask that is off by a token would train on the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.data_spec import Turns
from weft.core.errors import DataError, TokenizerError, first_line

ROLES = ("system", "developer", "user", "assistant", "tool")
# `conversations` of ShareGPT: names of the speakers
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
_SPEAKERS |= {"system": "system", "tool": "tool", "observation": "tool"}
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_MARKS = "mark the assistant's text in the template with {% generation %} ... {% endgeneration %}"

Message = dict[str, Any]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class EncodedChat:
    """The tokens of a chat, and those that an assistant turn generates."""

    tokens: list[int]
    counted: Mask


def read_messages(value: Any, *, where: str, field: str = "messages") -> list[Message]:
    """The messages of a row, checked: each a role and a text, or calls of tools."""
    if isinstance(value, str):
        value = _parse(value, where=where, field=field)
    if not isinstance(value, list) or not value:
        raise _bad(
            where, f"{field} is {'empty' if value in (None, []) else type(value).__name__}, not a list of messages"
        )
    return [_read_message(message, where=f"{where}: {field}[{index}]") for index, message in enumerate(value)]


def read_conversation(value: Any, *, system: Any, where: str) -> list[Message]:
    """The turns of a ShareGPT row (`from`, `value`) as messages."""
    if not isinstance(value, list) or not value:
        raise _bad(where, "conversations is empty or not a list of turns")
    turns = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(value):
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if speaker not in _SPEAKERS:
            known = ", ".join(_SPEAKERS)
            raise _bad(where, f"conversations[{index}] has from = {speaker!r}", hint=f"`from` is one of {known}")
        turns.append({"role": _SPEAKERS[speaker], "content": turn.get("value")})
    return read_messages(turns, where=where, field="conversations")


def read_tools(value: Any, *, where: str) -> list[Any] | None:
    """The tools of a row: a list of schemas, or that as JSON text."""
    tools = _parse(value, where=where, field="tools") if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not isinstance(tools, list):
        raise _bad(where, f"tools is {type(tools).__name__}, not a list of schemas")
    return [without_nulls(tool) for tool in tools]


def without_nulls(value: Any) -> Any:
    """The value without keys of None, which columns of a table have for rows without them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


class ChatRenderer:
    """Renders and tokenises chats with one template."""

    def __init__(self, backend: Any, *, name: str, template: str | None) -> None:
        """`template`: text that replaces the tokenizer's own."""
        self._backend = backend
        self._name = name
        self._given = template

    @cached_property
    def template(self) -> str:
        if self._given is not None:
            return self._given
        try:
            return str(self._backend.get_chat_template())
        except ValueError:
            raise TokenizerError(
                f"the tokenizer {self._name} has no chat template, which data.format needs for messages",
                hint="set data.chat_template to a file with one, or use the tokenizer of an instruction-tuned model",
            ) from None

    @cached_property
    def has_marks(self) -> bool:
        return _MARKS.search(self.template) is not None and bool(getattr(self._backend, "is_fast", False))

    def encode(
        self, messages: Sequence[Message], *, tools: list[Any] | None, where: str, is_prompt: bool = False
    ) -> list[int]:
        """The tokens of a chat; with `is_prompt` up to where the assistant would begin to write."""
        return list(self._apply(messages, tools, where, add_generation_prompt=is_prompt)["input_ids"])

    def encode_chat(
        self, messages: Sequence[Message], *, tools: list[Any] | None, turns: Turns, where: str
    ) -> EncodedChat:
        """The tokens of a chat and those that count; an error if none does."""
        if turns == "all":
            tokens = self.encode(messages, tools=tools, where=where)
            return EncodedChat(tokens=tokens, counted=np.ones(len(tokens), dtype=bool))
        if not any(message["role"] == "assistant" for message in messages):
            raise _bad(where, "no message has role 'assistant', so no token has a loss", hint="remove the row")
        chat = self._by_marks(messages, tools, where) if self.has_marks else self._by_prefixes(messages, tools, where)
        if not chat.counted.any():
            raise _bad(where, "the template marks no token of an assistant turn", hint=_NO_MARKS)
        return EncodedChat(tokens=chat.tokens, counted=_last_run(chat.counted)) if turns == "last" else chat

    def _by_marks(self, messages: Sequence[Message], tools: list[Any] | None, where: str) -> EncodedChat:
        found = self._apply(messages, tools, where, return_assistant_tokens_mask=True)
        return EncodedChat(tokens=list(found["input_ids"]), counted=np.asarray(found["assistant_masks"], dtype=bool))

    def _by_prefixes(self, messages: Sequence[Message], tools: list[Any] | None, where: str) -> EncodedChat:
        tokens = self.encode(messages, tools=tools, where=where)
        counted = np.zeros(len(tokens), dtype=bool)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                place = f"{where}: messages[{index}]"
                before = self.encode(messages[:index], tools=tools, where=place, is_prompt=True)
                after = self.encode(messages[: index + 1], tools=tools, where=place)
                for prefix, what in ((before, "before"), (after, "up to")):
                    if tokens[: len(prefix)] != prefix:
                        raise _bad(
                            place, f"the chat template renders the chat {what} this turn otherwise", hint=_NO_MARKS
                        )
                counted[len(before) : self._end_of_turn(tokens, len(before), len(after))] = True
        return EncodedChat(tokens=tokens, counted=counted)

    def _end_of_turn(self, tokens: list[int], begin: int, end: int) -> int:
        """The end of a turn without the blanks after its last special token, which no model has to generate."""
        special = [at for at in range(begin, end) if tokens[at] in self._special]
        if special and not self._backend.decode(tokens[special[-1] + 1 : end]).strip():
            return special[-1] + 1
        return end

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self._backend, "added_tokens_decoder", {})
        return frozenset(self._backend.all_special_ids) | {index for index, token in added.items() if token.special}

    def _apply(self, messages: Sequence[Message], tools: list[Any] | None, where: str, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._backend.apply_chat_template(
                list(messages), tools=tools, chat_template=self.template, tokenize=True, return_dict=True, **options
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise _bad(where, f"the chat template fails: {first_line(error)}", hint=_TEMPLATE) from None


_TEMPLATE = "check the roles and their order against the template, or give another one in data.chat_template"


def _read_message(message: Any, *, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise _bad(where, f"a {type(message).__name__} is not a message")
    found: Message = without_nulls(message)
    role = found.get("role")
    if role not in ROLES:
        raise _bad(where, f"role = {role!r} is unknown", hint=f"known roles: {', '.join(ROLES)}")
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = found["content"] = "".join(str(part.get("text", "")) for part in content)
    has_more = bool(found.get("tool_calls") or found.get("reasoning_content") or found.get("thinking"))
    if content is None and has_more:
        found["content"] = ""
    elif not isinstance(content, str):
        raise _bad(where, f"content is {'missing' if content is None else type(content).__name__}, not text")
    elif not content and not has_more and role in ("user", "assistant"):
        raise _bad(where, f"the content of role {role!r} is empty")
    return found


def _last_run(counted: Mask) -> Mask:
    """The mask without all but the last run of counted tokens."""
    last = int(np.flatnonzero(counted)[-1])
    gaps = np.flatnonzero(~counted[:last])
    result = np.zeros_like(counted)
    result[(int(gaps[-1]) + 1 if len(gaps) else 0) : last + 1] = True
    return result


def _parse(text: str, *, where: str, field: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise _bad(where, f"{field} is text that is not JSON") from None


def _bad(where: str, what: str, *, hint: str = "correct the row, or remove it") -> DataError:
    return DataError(f"{where}: {what}", hint=hint)
