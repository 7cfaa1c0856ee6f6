"""Chats: masks equal TRL's token for token, by marks and by prefixes; bad rows are one sentence with file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import FAMILIES, SPECIAL, make_chat_tokenizer, make_chats, template

from weft.core.data_spec import DataSpec
from weft.core.errors import DataError, TokenizerError
from weft.data import open_corpus
from weft.data.row_fields import SampleRow
from weft.data.samples import SampleEncoder
from weft.data.words import counted_of, tokens_of

GOLDEN = json.loads((Path(__file__).parent / "trl_masks.json").read_text())["samples"]
ASKED, ANSWERED = {"role": "user", "content": "a loom?"}, {"role": "assistant", "content": "of wool"}

Encode = Callable[..., list[tuple[list[int], list[bool]]]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    made: dict[tuple[str, bool], Path] = {}

    def folder(family: str, has_marks: bool) -> Path:
        key = family, has_marks
        if key not in made:
            where = tmp_path_factory.mktemp("chat-tokenizer")
            made[key] = make_chat_tokenizer(where, family, has_marks=has_marks)
        return made[key]

    return folder


@pytest.fixture
def encode(folders: Callable[[str, bool], Path]) -> Encode:
    def run(
        rows: list[dict[str, Any]], family: str = "chatml", *, has_marks: bool = True, **keys: Any
    ) -> list[tuple[list[int], list[bool]]]:
        spec = DataSpec(**{"format": "chat", "tokenizer": str(folders(family, has_marks)), **keys})
        texts = [SampleRow(where=f"rows.jsonl:{at}", fields=row).to_text() for at, row in enumerate(rows, start=1)]
        words = SampleEncoder(spec).encode_batch(texts)
        return [(tokens_of(row, row.dtype).tolist(), counted_of(row, row.dtype).tolist()) for row in words]

    return run


def counted_text(folder: Path, sample: tuple[list[int], list[bool]]) -> str:
    from transformers import AutoTokenizer

    tokens = [token for token, counts in zip(*sample, strict=True) if counts]
    return str(AutoTokenizer.from_pretrained(folder).decode(tokens))


@pytest.mark.parametrize("has_marks", [True, False], ids=["marks", "prefixes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_equal_those_of_trl(family: str, has_marks: bool, encode: Encode) -> None:
    """The golden file is written by `benchmarks/sft_masks.py golden`, with TRL's own trainer."""
    theirs = GOLDEN[family]
    own = encode(make_chats(len(theirs), seed=11, has_tools=family == "chatml"), family, has_marks=has_marks)
    for (tokens, counted), sample in zip(own, theirs, strict=True):
        assert tokens == sample["input_ids"]
        assert [token if counts else -100 for token, counts in zip(tokens, counted, strict=True)] == sample["labels"]


def test_which_turns_count(encode: Encode, folders: Callable[[str, bool], Path]) -> None:
    row = {"messages": [ASKED, ANSWERED, ASKED, {"role": "assistant", "content": "of silk"}]}
    for has_marks in (True, False):
        folder = folders("chatml", has_marks)
        texts = {
            turns: counted_text(folder, encode([row], has_marks=has_marks, train_on=turns)[0])
            for turns in ("assistant", "last")
        }
        assert texts == {"assistant": "of wool<|im_end|>of silk<|im_end|>", "last": "of silk<|im_end|>"}
        assert all(encode([row], has_marks=has_marks, train_on="all")[0][1])


def test_other_spellings_of_the_same_chat(encode: Encode) -> None:
    plain = {"messages": [{"role": "system", "content": "weave"}, ASKED, ANSWERED]}
    turns = [{"from": "human", "value": "a loom?"}, {"from": "gpt", "value": "of wool"}]
    table = {
        "messages": [{**message, "tool_calls": None, "name": None} for message in plain["messages"]],
        "tools": None,
    }
    parts = [*plain["messages"][:2], {"role": "assistant", "content": [{"type": "text", "text": "of wool"}]}]
    first, *others = encode(
        [
            plain,
            {"conversations": turns, "system": "weave"},
            table,
            {"messages": parts},
            {"messages": json.dumps(parts)},
        ]
    )
    assert all(other == first for other in others)


@pytest.mark.parametrize("has_marks", [True, False])
def test_completions_count_and_prompts_do_not(has_marks: bool, encode: Encode, folders: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a loom", "completion": " weaves"},
        {"prompt": "a lo", "completion": "om weaves"},  # the tokens of both together are others
        {"prompt": [ASKED], "completion": [ANSWERED]},
    ]
    folder = folders("chatml", has_marks)
    found = encode(rows, has_marks=has_marks, format="prompt-completion")
    ends = ["<|im_end|>", "<|im_end|>", "<|im_end|>\n"]
    texts = [" weaves", "om weaves", "of wool"]
    assert [counted_text(folder, sample) for sample in found] == [a + b for a, b in zip(texts, ends, strict=True)]


def test_a_pair_is_two_samples_of_one_prompt(encode: Encode, folders: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a loom", "chosen": " weaves", "rejected": " and"},
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, {"role": "assistant", "content": "of cloth"}]},
    ]
    found = encode(rows, format="preference")
    texts = [counted_text(folders("chatml", True), sample).strip() for sample in found]
    end = "<|im_end|>"
    assert texts == [f"weaves{end}", f"and{end}", f"of wool{end}", f"of cloth{end}"]
    prompts = [[token for token, counts in zip(*sample, strict=True) if not counts] for sample in found]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]


BAD_ROWS = {
    "no messages": ({"text": "x"}, r"rows.jsonl:2: a row of data.format = 'chat' needs the fields messages or conv"),
    "empty": ({"messages": []}, r"rows.jsonl:2: messages is empty"),
    "not a list": ({"messages": {"role": "user"}}, r"rows.jsonl:2: messages is dict"),
    "not a message": ({"messages": ["hi"]}, r"rows.jsonl:2: messages\[0\]: a str is not a message"),
    "role": ({"messages": [{"role": "bot", "content": "x"}]}, r"rows.jsonl:2: messages\[0\]: role = 'bot' is unknown"),
    "no content": ({"messages": [{"role": "user"}, ANSWERED]}, r"rows.jsonl:2: messages\[0\]: content is missing"),
    "empty content": (
        {"messages": [ASKED, {"role": "assistant", "content": ""}]},
        r"rows.jsonl:2: messages\[1\]: the content of role 'assistant' is empty",
    ),
    "no assistant": ({"messages": [ASKED]}, r"rows.jsonl:2: no message has role 'assistant'"),
    "speaker": (
        {"conversations": [{"from": "cat", "value": "x"}]},
        r"rows.jsonl:2: conversations\[0\] has from = 'cat'",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_one_sentence_with_its_line(name: str, tmp_path: Path, write_jsonl: Any, folders: Any) -> None:
    row, sentence = BAD_ROWS[name]
    path = write_jsonl("rows.jsonl", [{"messages": [ASKED, ANSWERED]}, row])
    spec = DataSpec(source=str(path), format="chat", tokenizer=str(folders("chatml", True)))
    with pytest.raises(DataError, match=sentence) as caught:
        open_corpus(spec, cache_dir=tmp_path)
    assert caught.value.hint


def test_a_template_that_does_not_take_the_row_is_named(encode: Encode) -> None:
    row = {"messages": [ASKED, {"role": "tool", "content": "x"}, ANSWERED]}
    with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template fails: no turns of tool"):
        encode([row], "mistral")


def test_a_template_whose_prefixes_differ_needs_marks(encode: Encode, tmp_path: Path) -> None:
    """This one has the number of messages at its start: no prefix of the chat begins as the chat does."""
    path = tmp_path / "numbered.jinja"
    path.write_text("{{- messages | length }}" + template("chatml", has_marks=False))
    row = {"messages": [ASKED, ANSWERED]}
    with pytest.raises(DataError, match=r"rows.jsonl:1: messages\[1\]: .* before this turn otherwise") as caught:
        encode([row], chat_template=str(path))
    assert "generation" in caught.value.hint
    path.write_text("{{- messages | length }}" + template("chatml", has_marks=True))
    assert sum(encode([row], chat_template=str(path))[0][1]) > 0


def test_a_tokenizer_without_a_template(tmp_path: Path, write_jsonl: Any) -> None:
    path = write_jsonl("rows.jsonl", [{"messages": [ASKED, ANSWERED]}] * 3)
    spec = DataSpec(source=str(path), format="chat", tokenizer="bytes", eval_fraction=0)
    with pytest.raises(TokenizerError, match="the tokenizer bytes has no chat template") as caught:
        open_corpus(spec, cache_dir=tmp_path)
    assert "data.chat_template" in caught.value.hint
    with pytest.raises(TokenizerError, match=r"gone\.jinja cannot be read"):
        open_corpus(spec.model_copy(update={"chat_template": "gone.jinja"}), cache_dir=tmp_path)
    given = tmp_path / "given.jinja"
    given.write_text(template("chatml", has_marks=True))
    corpus = open_corpus(spec.model_copy(update={"chat_template": str(given)}), cache_dir=tmp_path)
    tokens = tokens_of(corpus.training.tokens, corpus.training.tokens.dtype)
    assert bytes(tokens[: corpus.training.bounds[0, 1]].tolist()) == (
        b"<|im_start|>user\na loom?<|im_end|>\n<|im_start|>assistant\nof wool<|im_end|>\n"
    )


def test_another_template_or_choice_is_another_cache(tmp_path: Path, write_jsonl: Any, folders: Any) -> None:
    path = write_jsonl("rows.jsonl", [{"messages": [ASKED, ANSWERED]}] * 3)
    spec = DataSpec(source=str(path), format="chat", tokenizer=str(folders("chatml", True)))
    other = tmp_path / "other.jinja"
    other.write_text(template("gemma", has_marks=True))
    changes: list[dict[str, Any]] = [{}, {"train_on": "all"}, {"chat_template": str(other)}]
    paths = {open_corpus(spec.model_copy(update=change), cache_dir=tmp_path).path for change in changes}
    assert len(paths) == 3
    other.write_text(template("llama-3", has_marks=True))
    again = open_corpus(spec.model_copy(update={"chat_template": str(other)}), cache_dir=tmp_path)
    assert again.path not in paths


def test_parquet_and_datasets_give_the_tokens_of_jsonl(tmp_path: Path, write_jsonl: Any, folders: Any) -> None:
    datasets = pytest.importorskip("datasets")
    chats = make_chats(12, seed=3, has_tools=True)
    table = datasets.Dataset.from_list([{"tools": None, **chat} for chat in chats])
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    sources = [str(write_jsonl("rows.jsonl", chats)), str(tmp_path / "rows.parquet"), f"hf:{tmp_path / 'saved'}"]
    spec = DataSpec(format="chat", tokenizer=str(folders("chatml", True)), eval_fraction=0)
    found = [
        open_corpus(spec.model_copy(update={"source": source}), cache_dir=tmp_path).training.tokens
        for source in sources
    ]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert len(SPECIAL["chatml"]) == 3
