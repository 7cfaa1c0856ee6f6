"""Run descriptions: the default is valid, prints and parses back; wrong values are named."""

from __future__ import annotations

import tomllib

import pytest
from pydantic import Field

from weft.core.config import Document, Section
from weft.core.errors import BadValueError, UnknownKeyError
from weft.core.run_spec import DEFAULT_RUN, RunSpec


def test_the_default_prints_and_parses_back() -> None:
    run = RunSpec.default()
    assert RunSpec.from_tables(tomllib.loads(run.to_toml())) == run


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "steps", 0),
        ("train", "optimizer", "adamax"),
        ("train", "learning_rate", -1),
        ("data", "sequence_length", 1),
        ("data", "eval_fraction", 1.0),
        ("checkpoint", "keep", 0),
    ],
)
def test_bad_values_name_the_key(section: str, key: str, value: object) -> None:
    with pytest.raises(BadValueError, match=f"{section}.{key}") as caught:
        RunSpec.from_tables({**DEFAULT_RUN, section: {**DEFAULT_RUN.get(section, {}), key: value}})
    assert caught.value.hint


def test_a_model_needs_exactly_one_source() -> None:
    for model in ({}, {"type": "llama", "path": "somewhere"}, {"type": "llama", "weights": "pretrained"}):
        with pytest.raises(BadValueError, match="model"):
            RunSpec.from_tables({"model": model})


def test_misspelt_keys_are_found_in_every_section() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        RunSpec.from_tables({**DEFAULT_RUN, "train": {"global_bach": 8}})
    assert "'global_batch'" in caught.value.hint


def test_8_bit_has_no_choice_of_kernel() -> None:
    chosen = {"optimizer": "adamw8bit", "optimizer_kernel": "foreach"}
    with pytest.raises(BadValueError, match="adamw8bit has its own kernel"):
        RunSpec.from_tables({**DEFAULT_RUN, "train": chosen})
    assert RunSpec.from_tables({**DEFAULT_RUN, "train": {**chosen, "optimizer_kernel": "auto"}})


@pytest.mark.parametrize("tables", [{}, {"model": 3}, {"model": {"type": "llama"}, "data": "text"}])
def test_a_section_that_is_missing_or_no_table_is_answered_with_its_keys(tables: dict[str, object]) -> None:
    with pytest.raises(BadValueError) as caught:
        RunSpec.from_tables(tables)
    section, key = ("data", "source") if "data" in tables else ("model", "path")
    assert f"[{section}] is a table" in caught.value.hint
    assert key in caught.value.hint


def test_no_hint_names_a_default_that_does_not_exist() -> None:
    class Inner(Section):
        needed: int
        listed: list[int] = Field(default_factory=lambda: [1])
        plain: int = 7

    class Outer(Document):
        inner: Inner

    hints = {}
    for key in ("needed", "listed", "plain"):
        with pytest.raises(BadValueError) as caught:
            Outer.from_tables({"inner": {"needed": 1, key: "x"}})
        hints[key] = caught.value.hint
    assert hints == {
        "needed": "inner.needed has no default: give it a value",
        "listed": "the default is [1]",
        "plain": "the default is 7",
    }
