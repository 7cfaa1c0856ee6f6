"""Runs of one process whose forwards read weights that are moved: made of mixtures, and equal to the truth at first."""

from __future__ import annotations

from pathlib import Path

import pytest
from verify_ranks import small_run

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.verify.exercise import Subject, global_exercise
from weft.verify.near_ties import SHARES, Perturbation
from weft.verify.references import ReferenceCache, References


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(6):
        (texts / f"{index}.txt").write_text(f"{'plain text ' * 40}{index}\n" * 4, encoding="utf-8")
    return str(texts)


def references_of(corpus: str, model: str) -> References:
    subject = Subject.open(RunSpec.from_tables(small_run(corpus, model=model)))
    cache = ReferenceCache(is_main=True)
    return cache.references(
        "exercise", subject, lambda: global_exercise(subject, rates=[1e-2, 1e-2], clip_norm=1.0), Plan.from_tables({})
    )


def test_a_mixture_is_moved_after_its_first_update(corpus: str) -> None:
    references = references_of(corpus, "mixtral")
    assert references.perturbed is not None
    truth, moved = references.truth, references.perturbed(Perturbation(0, SHARES[-1]))
    assert moved.losses[0] == truth.losses[0], "nothing has trained yet"
    assert 0 < abs(moved.losses[1] - truth.losses[1]) < 1e-3
    assert moved.choices[0].keys() == truth.choices[0].keys() != set()
    assert moved.weights.keys() == truth.weights.keys()


def test_a_dense_model_has_no_such_runs(corpus: str) -> None:
    assert references_of(corpus, "llama").perturbed is None
