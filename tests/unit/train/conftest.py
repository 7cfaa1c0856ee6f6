"""A corpus per test, and no process group that outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import write_corpus

from weft.train.ranks.process import leave


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield write_corpus(tmp_path / "texts")
    leave()
