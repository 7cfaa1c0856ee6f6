"""A small corpus and a token cache of their own for runs that end in an error."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import write_corpus, write_run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture
def here(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder: a run.toml in it, nothing of an outer launcher around it."""
    from weft.train.ranks.process import leave

    for name in ("RANK", "WORLD_SIZE", "WEFT_DEBUG", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run.toml", corpus)
    yield tmp_path
    leave()  # a run that failed keeps its group, so that peers could hear of the error
