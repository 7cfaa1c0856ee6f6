"""Verify judges buffers that forwards change: those of one process pass, planted bugs are caught by that check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP
from verify_ranks import Tables, open_session, small_run

from weft.core.plan import Plan
from weft.engine.buffers.sync import BufferSync
from weft.engine.dp import batch_norm
from weft.verify.evidence import Evidence

DDP = {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 2}}


@contextmanager
def keeping_statistics() -> Iterator[None]:
    """Every MLP of a Llama ends in a batch norm and in a division by a running size of its own."""
    build, compute = LlamaMLP.__init__, LlamaMLP.forward

    def init(self: Any, config: Any) -> None:
        build(self, config)
        self.norm = nn.BatchNorm1d(config.hidden_size, affine=False)
        self.register_buffer("size", torch.ones(config.hidden_size))

    def forward(self: Any, x: Tensor) -> Tensor:
        given = self.norm(compute(self, x).transpose(1, 2)).transpose(1, 2)
        divided = given / (1.0 + self.size)
        if self.training:
            self.size = 0.5 * self.size + 0.5 * x.detach().abs().mean((0, 1))
        return divided

    with patch.object(LlamaMLP, "__init__", init), patch.object(LlamaMLP, "forward", forward):
        yield


def not_synchronised() -> AbstractContextManager[Any]:
    return patch.object(BufferSync, "_average", lambda *_: None)


def statistics_of_one_rank() -> AbstractContextManager[Any]:
    return patch.object(batch_norm, "_sum", lambda own, _group: own.detach().clone())


def stale_values() -> AbstractContextManager[Any]:
    """What is kept is the value that forwards began with, as a stage has it that never runs the module."""

    def values(self: BufferSync) -> dict[str, Tensor]:
        slots = enumerate(self.changes.slots)
        return {slot.name: self.changes.first_value(at) for at, slot in slots if self.owners[at] in self._own}  # type: ignore[misc]

    return patch.object(BufferSync, "values", values)


BUGS: dict[str, tuple[Tables, Callable[[], AbstractContextManager[Any]]]] = {
    "ddp": (DDP, nullcontext),
    "pipeline": (PIPELINE, nullcontext),
    "not synchronised": (DDP, not_synchronised),
    "statistics of one rank": (DDP, statistics_of_one_rank),
    "stale": (PIPELINE, stale_values),
}


def checked(rank: int, _world: int, run: Tables, scratch: str) -> dict[str, dict[str, str]]:
    """The names of the checks that fail, by bug, on rank 0."""
    found: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        stack.enter_context(keeping_statistics())
        session = stack.enter_context(open_session(run, scratch, steps=3))
        for name, (tables, mutate) in BUGS.items():
            plan = Plan.from_tables(tables)
            references = session.references(plan)
            with mutate():
                evidence: Evidence = session.evidence(plan)
            if rank == 0:
                checks = session._comparison(plan, references, evidence).checks()
                found[name] = {check.name: check.detail for check in checks if not check.ok}
    return found


@pytest.mark.extended
def test_buffers_are_judged(corpus: Path, tmp_path: Path) -> None:
    run = small_run(str(corpus), train={"optimizer": "sgd", "learning_rate": 0.1})
    found, _ = run_ranks(checked, 2, run, str(tmp_path), timeout_s=150.0)
    assert found["ddp"] == {}
    assert found["pipeline"] == {}
    for bug in ("not synchronised", "statistics of one rank", "stale"):
        assert "buffers" in found[bug], (bug, found[bug])
