"""A Hugging Face cache made by hand: what `hf download` leaves behind, without a network. For tests only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# nothing listens there: a machine without a network, whatever machine this is
NOWHERE = "http://127.0.0.1:9"


def put_in_cache(hub: Path, name: str, files: Path, *, commit: str = COMMIT, revision: str = "main") -> Path:
    """A copy of `files` as the snapshot of `name`; returns its folder."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(files, snapshot)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    return snapshot


def use_cache(hub: Path, patch: pytest.MonkeyPatch) -> None:
    """This process has that cache, and no network."""
    from huggingface_hub import constants

    patch.setattr(constants, "HF_HUB_CACHE", str(hub))
    patch.setattr(constants, "ENDPOINT", NOWHERE)
