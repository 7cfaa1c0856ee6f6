"""Engines with optimizer offload beside the same ones without it, and all their bits. For tests only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from tiny import build_engine, train_steps

from weft.checkpoint.staging import local_shards
from weft.core import offload_sizes
from weft.engine.engine import Engine

SMALL_CHUNK = 2048  # elements: several chunks, and matrices of the tiny models in pieces


@contextmanager
def small_chunks() -> Iterator[None]:
    with mock.patch.object(offload_sizes, "CHUNK_ELEMENTS", SMALL_CHUNK):
        yield


def offloaded(plan: dict[str, Any], update: str) -> dict[str, Any]:
    """The plan with its states on the host, `update` "device, masters" with masters too, "device, weights" with
    weights; "" leaves it as it is."""
    if not update:
        return plan
    place, _, what = update.partition(", ")
    more = {"": {}, "masters": {"masters": "host"}, "weights": {"parameters": "cpu"}}
    offload = {"optimizer": "cpu", "update": place, **more[what]}
    return {**plan, "offload": offload}


def digests(engine: Engine) -> dict[str, str]:
    """Of every byte of model and optimizer that this rank holds, by name."""
    shards = local_shards(engine.state())
    return {name: hashlib.sha256(_bytes(shard)).hexdigest() for name, shard in sorted(shards.items())}


def _bytes(shard: torch.Tensor) -> bytes:
    return shard.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if shard.numel() else b""


def trained(family: str, plan: dict[str, Any], update: str, *, steps: int = 4, **options: Any) -> tuple[Any, Any]:
    """Losses and gradient norms, then the digests at the end."""
    with small_chunks():
        engine = build_engine(family, offloaded(plan, update), **options)
    return train_steps(engine, steps), digests(engine)
