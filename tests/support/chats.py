"""Chats, four chat templates in the formats of well-known families, and a small BPE tokenizer for each. For tests only.

Every template exists with `{% generation %}` marks and without: both ways must give one mask.
"""

# ruff: noqa: E501
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

END = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}
BEGIN = {"chatml": None, "llama-3": "<|begin_of_text|>", "mistral": "<s>", "gemma": "<bos>"}
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "llama-3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
}
FAMILIES = tuple(SPECIAL)
_TEMPLATES = {
    "chatml": """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "llama-3": """{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{- message.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{- message.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "mistral": """{{- '<s>' }}{%- set state = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{%- set state.system = message.content + '\\n\\n' %}
{%- elif message.role == 'user' %}{{- '[INST]' + state.system + message.content + '[/INST]' }}{%- set state.system = '' %}
{%- elif message.role == 'assistant' %}{% generation %}{{- message.content + '</s>' }}{% endgeneration %}
{%- else %}{{- raise_exception('no turns of ' + message.role) }}{%- endif %}
{%- endfor %}""",
    "gemma": """{{- '<bos>' }}{%- set state = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{%- set state.system = message.content + '\\n\\n' %}
{%- elif message.role == 'assistant' %}
{{- '<start_of_turn>model\\n' }}{% generation %}{{- message.content | trim + '<end_of_turn>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}
{{- '<start_of_turn>' + message.role + '\\n' + state.system + message.content | trim + '<end_of_turn>\\n' }}
{%- set state.system = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
}
_WORDS = [
    "the",
    "a",
    "loom",
    "weaves",
    "cloth",
    "of",
    "wool",
    "and",
    "silk",
    "thread",
    "by",
    "thread",
    "naïve",
    "Größe",
    "漢字",
    "🧵",
    "def",
    "f(x):",
    "return",
    "x+1",
    "\n",
    "\t",
    "3.14",
]


def template(family: str, *, has_marks: bool) -> str:
    text = _TEMPLATES[family]
    if has_marks:
        return text
    for mark in ("{% generation %}", "{% endgeneration %}"):
        text = text.replace(mark, "")
    return text


def make_chats(count: int, *, seed: int = 0, has_tools: bool = False) -> list[dict[str, Any]]:
    """Rows of chats: with and without a system turn, one to four exchanges, odd spaces and letters."""
    draw = random.Random(seed)
    return [_chat(draw, has_tools=has_tools and index % 4 == 0) for index in range(count)]


def make_chat_tokenizer(folder: Path, family: str, *, has_marks: bool, vocab_size: int = 420) -> Path:
    """A byte-level BPE with the family's special tokens and template, as a folder that transformers loads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL[family], initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator([" ".join(_WORDS)] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    names = {"eos_token": END[family], **({"bos_token": BEGIN[family]} if BEGIN[family] else {})}
    PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template(family, has_marks=has_marks), **names
    ).save_pretrained(folder)
    return folder


def _chat(draw: random.Random, *, has_tools: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": _text(draw)})
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": _text(draw)})
        if has_tools:
            call = {"type": "function", "function": {"name": "weave", "arguments": {"rows": draw.randint(1, 9)}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": _text(draw)})
        messages.append({"role": "assistant", "content": _text(draw)})
    tools = [{"type": "function", "function": {"name": "weave", "parameters": {"type": "object"}}}]
    return {"messages": messages, **({"tools": tools} if has_tools else {})}


def _text(draw: random.Random) -> str:
    text = " ".join(draw.choices(_WORDS, k=draw.randint(1, 12)))
    return text.strip() or "loom"
