"""Values planted into a run: losses of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from weft.core.records import EvalRecord
from weft.engine.engine import Engine


@contextmanager
def scripted_losses(losses: Mapping[int, float], *, otherwise: float) -> Iterator[None]:
    """The loss of every evaluation, by the step before it."""

    def evaluate(engine: Engine, _batches: Any) -> EvalRecord:
        return EvalRecord(loss=losses.get(engine.steps_done, otherwise), tokens=8)

    with patch.object(Engine, "evaluate", evaluate):
        yield
