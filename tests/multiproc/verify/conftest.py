"""What the verifications share: a corpus."""

from pathlib import Path

import pytest
from tiny_run import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")
