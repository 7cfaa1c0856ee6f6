"""What the tests of whole runs share: a corpus, and a token cache of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import write_corpus

from weft.train.ranks.process import leave


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The token cache, also of runs in this process."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    """A run that failed in this process keeps its group, so that peers could hear of the error: not for the next."""

    yield
    leave()
