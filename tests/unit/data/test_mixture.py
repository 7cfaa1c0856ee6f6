"""Mixtures: shares by samples and tokens, an order of seed and samples alone, epochs of each source of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.data_spec import DataSpec
from weft.core.errors import BadValueError
from weft.core.run_spec import RunSpec
from weft.data import Loader, open_corpus
from weft.data.mixture import BLOCK, MixedRows, MixtureOrder, block_places
from weft.data.rows import RowLayout

SHARES = st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=5).map(lambda ws: [w / sum(ws) for w in ws])


@given(shares=SHARES)
def test_places_of_a_block_follow_the_shares(shares: list[float]) -> None:
    places = block_places(shares)
    assert places.sum() == BLOCK
    assert places.min() >= 1
    assert np.abs(places - np.array(shares) * BLOCK).max() <= len(shares)


@given(
    shares=SHARES, sizes=st.lists(st.integers(1, 9), min_size=5, max_size=5), seed=st.integers(0, 5),
    start=st.one_of(st.integers(0, 99), st.integers(BLOCK - 40, BLOCK + 40)),
)  # fmt: skip
def test_rows_depend_on_the_sample_alone(shares: list[float], sizes: list[int], seed: int, start: int) -> None:
    order = MixtureOrder(shares, sizes[: len(shares)], seed=seed)
    samples = start + np.arange(60)
    rows = order.rows(samples)
    again = MixtureOrder(shares, sizes[: len(shares)], seed=seed)
    assert all(again.rows(samples[at : at + 1])[0] == rows[at] for at in range(0, 60, 7))
    assert (rows >= 0).all()
    assert (rows < sum(sizes[: len(shares)])).all()


def test_any_stretch_has_the_shares_to_a_few_samples() -> None:
    order = MixtureOrder([0.7, 0.25, 0.05], [100, 100, 100], seed=4)
    for begin in (0, 1000, BLOCK - 100):
        owners, _ = order.draws(begin + np.arange(400))
        assert np.abs(np.bincount(owners, minlength=3) - [280, 100, 20]).max() <= 3


def test_every_source_has_epochs_of_its_own() -> None:
    order = MixtureOrder([0.75, 0.25], [30, 7], seed=1)
    owners, numbers = order.draws(np.arange(400))
    rows = order.rows(np.arange(400))
    for owner, size, first in ((0, 30, 0), (1, 7, 30)):
        own = rows[owners == owner]
        assert numbers[owners == owner].tolist() == list(range(len(own)))
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(first, first + size))
        assert own[:size].tolist() != own[size : 2 * size].tolist()
    counts = np.bincount(owners, minlength=2)
    assert order.epochs(400) == pytest.approx([counts[0] / 30, counts[1] / 7])


@pytest.fixture
def spec(tmp_path: Path, write_jsonl: Any) -> DataSpec:
    (tmp_path / "a.txt").write_text("a" * 500)
    rows = write_jsonl("b.jsonl", [{"prompt": "?", "completion": "b" * 7}] * 20)
    sources = [
        {"source": str(tmp_path / "a.txt"), "weight": 3.0},
        {"source": str(rows), "weight": 1.0, "format": "prompt-completion"},
    ]
    return DataSpec(sources=sources, sequence_length=16, eval_fraction=0)


def letters(loader: Loader, count: int) -> list[str]:
    return [chr(int(loader.batch(position)["input_ids"][0, 3])) for position in range(count)]


@pytest.mark.parametrize(("weigh_by", "expected"), [("samples", 30), ("tokens", 24)])
def test_weights_are_shares_of_samples_or_of_tokens(
    weigh_by: str, expected: int, spec: DataSpec, tmp_path: Path
) -> None:
    """A row of text has 16 tokens, one of the completions 8: 3:1 of the tokens is 3:2 of the samples."""
    corpus = open_corpus(spec.model_copy(update={"weigh_by": weigh_by}), cache_dir=tmp_path)
    loader = Loader(corpus.training, seed=0, global_batch=1, layout=RowLayout.of(spec))
    assert isinstance(loader.rows, MixedRows)
    assert abs(letters(loader, 40).count("a") - expected) <= 1


def test_an_evaluation_has_every_row_once_and_all_sources_from_the_start(spec: DataSpec, tmp_path: Path) -> None:
    corpus = open_corpus(spec, cache_dir=tmp_path)
    loader = Loader(corpus.training, seed=0, global_batch=1, layout=RowLayout.of(spec), epochs=1, shuffle=False)
    seen = letters(loader, loader.num_rows)
    assert (seen.count("a"), seen.count("b")) == (31, 20)
    assert set(seen[:4]) == {"a", "b"}
    assert not loader.has_batch(loader.num_rows)


def test_ranks_and_resume_read_the_same_samples(spec: DataSpec, tmp_path: Path) -> None:
    corpus = open_corpus(spec, cache_dir=tmp_path)
    run: dict[str, Any] = {"seed": 3, "layout": RowLayout.of(spec)}
    whole = Loader(corpus.training, global_batch=8, **run).batch(24)
    parts = [Loader(corpus.training, global_batch=8, dp_rank=rank, dp_degree=4, **run).batch(24) for rank in range(4)]
    for key, values in whole.items():
        assert np.array_equal(np.concatenate([part[key] for part in parts]), values)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"source": "a.txt", "sources": [{"source": "b.txt"}]}, "give source or sources, not both"),
        ({"sources": [{"source": "a.txt", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"source": "a.jsonl", "format": "preference"}]}, r"sources\[0\]: pairs .* are not mixed"),
        ({"sources": [{"source": "a.txt", "train_on": "last"}]}, r"sources\[0\]: train_on is for format = 'chat'"),
    ],
)
def test_bad_mixtures(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadValueError, match=sentence):
        RunSpec.from_tables({"model": {"type": "llama"}, "data": data})


def test_the_printed_form_of_a_mixture_parses_back(spec: DataSpec) -> None:
    run = RunSpec.from_tables(
        {"model": {"type": "llama"}, "data": spec.model_dump(exclude_none=True, exclude={"source"})}
    )
    import tomllib

    assert RunSpec.from_tables(tomllib.loads(run.to_toml())) == run
