"""Tokenising that takes longer than any collective may: ranks wait, and a builder that is killed has lost nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny_run import environment, metrics, train_here

from weft.core.data_spec import DataSpec
from weft.data import open_corpus, parts
from weft.data.byte_tokenizer import ByteTokenizer

TIMEOUT_S = 8.0
SLOW_S = 12.0

SLOW_BUILDER = """
import sys, time
from weft.core.data_spec import DataSpec
from weft.data import open_corpus, parts
from weft.data.byte_tokenizer import ByteTokenizer
original = ByteTokenizer.encode_batch
def slow(self, documents):
    time.sleep(0.2)
    return original(self, documents)
ByteTokenizer.encode_batch = slow
parts.PART_DOCUMENTS = 2
open_corpus(DataSpec(source=sys.argv[1]), cache_dir=sys.argv[2])
"""


def train_slowly(rank: int, world: int, port: int, folder: str, corpus: str) -> int:
    """A run as torchrun would start it, with a tokenizer that takes longer than a collective may."""
    dist.destroy_process_group()
    places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "XDG_CACHE_HOME": f"{folder}/cache"})
    encoded: list[int] = []
    original = ByteTokenizer.encode_batch

    def slow(self: ByteTokenizer, documents: Sequence[Any]) -> list[Any]:
        encoded.append(len(documents))
        time.sleep(SLOW_S)
        return original(self, documents)

    ByteTokenizer.encode_batch = slow  # type: ignore[method-assign]
    settings = {"train.steps": 2, "train.collective_timeout_s": TIMEOUT_S, "logging.tensorboard": False}
    train_here(Path(folder, "run"), Path(corpus), settings, plan={"mesh": {"dp_replicate": world}})
    return sum(encoded)


@pytest.mark.slow
def test_ranks_wait_for_tokens_longer_than_for_a_collective(corpus: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    encoded = run_ranks(train_slowly, 2, port, str(tmp_path), str(corpus), timeout_s=150)
    assert sorted(encoded) == [0, len(list(corpus.iterdir()))]  # one rank tokenised, once
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_after_a_kill_the_next_takes_over_at_once_and_keeps_what_was_done(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, spec = tmp_path / "cache", DataSpec(source=str(corpus))
    command = [sys.executable, "-c", SLOW_BUILDER, str(corpus), str(cache)]
    with subprocess.Popen(command, env=environment(cache)) as builder:
        while len(list(cache.glob("*.parts/0*"))) < 3:
            assert builder.poll() is None
            time.sleep(0.05)
        builder.kill()
    assert list(cache.glob("*.lock"))
    done = 2 * len(list(cache.glob("*.parts/0*")))
    encoded: list[int] = []
    original = ByteTokenizer.encode_batch

    def counted(self: ByteTokenizer, documents: Sequence[Any]) -> list[Any]:
        encoded.append(len(documents))
        return original(self, documents)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", counted)
    monkeypatch.setattr(parts, "PART_DOCUMENTS", 2)
    found = open_corpus(spec, cache_dir=cache)
    assert sum(encoded) == len(list(corpus.iterdir())) - done
    assert found.path.read_bytes() == open_corpus(spec, cache_dir=tmp_path / "serial").path.read_bytes()
    assert list(cache.iterdir()) == [found.path]
