"""Verification of parameter servers: right runs pass, each planted bug is found by the check that should find it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.core.server_spec import ServerRun
from weft.server.node import reshard as resharding
from weft.server.node import state as states
from weft.server.node.state import State
from weft.server.table.table import Table
from weft.server.units import UnitSet
from weft.server.worker.rows import ServerRows
from weft.verify.server import OPTIMIZERS, ServerSession
from weft.verify.server_runs import schedule, shrunk
from weft.verify.verdict import Check

STEPS = 3


def checks(tmp_path: Path, run: ServerRun | None = None, **fields: Any) -> dict[str, Check]:
    small, _ = shrunk(run or ServerRun(), steps=STEPS, as_is=False)
    given = {"optimizers": ("adagrad",), "layouts": ((2, 2),), **fields}
    session = ServerSession(run=small, steps=STEPS, scratch=tmp_path, **given)
    return {check.name: check for check in session.checks()}


def test_a_right_run_passes_with_every_optimizer(tmp_path: Path) -> None:
    found = checks(tmp_path, optimizers=OPTIMIZERS, layouts=((4, 3),))
    assert [check.detail for check in found.values() if not check.ok] == []
    assert len(found) == len(OPTIMIZERS) + 4
    assert all(check.margin < 0.5 for check in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepfm", "wide_deep", "logistic"])
def test_every_layout_of_every_model_passes(tmp_path: Path, kind: str) -> None:
    run = ServerRun.from_tables({"model": {"kind": kind}})
    layouts = tuple((workers, servers) for workers in (1, 2, 4) for servers in (1, 2, 3))
    found = checks(tmp_path, run, optimizers=OPTIMIZERS, layouts=layouts)
    assert [check.detail for check in found.values() if not check.ok] == []


def _weights_ignored(patch: pytest.MonkeyPatch) -> None:
    change = State._change
    patch.setattr(
        State,
        "_change",
        lambda self, frame, section, number, *, is_replay: change(
            self, frame._replace(weight=1.0), section, number, is_replay=is_replay
        ),
    )


def _last_share_wins(patch: pytest.MonkeyPatch) -> None:
    def last(keys: Any, values: Any) -> Any:
        found = dict(zip(keys.tolist(), range(len(keys)), strict=True))
        return np.array(list(found), np.int64), values[list(found.values())]

    patch.setattr(states, "coalesce", last)


def _share_lost(patch: pytest.MonkeyPatch) -> None:
    summed = states._summed
    patch.setattr(states, "_summed", lambda shares: summed(list(shares)[:-1]))


def _no_discount(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "lr_scale_of", lambda self, frame: (0, frame.lr_scale))


def _share_as_a_step(patch: pytest.MonkeyPatch) -> None:
    """Each push of async as large as a whole step."""
    patch.setattr(ServerRows, "_parts", property(lambda self: 1, lambda self, parts: None), raising=False)


def _adam_as_fast(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(states, "push_rate", lambda optimizer, *, shares: 1.0)


def _late_by_one(patch: pytest.MonkeyPatch) -> None:
    """Staleness counted from the wrong pull."""
    real = State.lr_scale_of
    patch.setattr(
        State, "lr_scale_of", lambda self, frame: real(self, frame._replace(version=max(0, frame.version - 1)))
    )


def _epsilon_for_rate(patch: pytest.MonkeyPatch) -> None:
    real = Table.push
    patch.setattr(
        Table, "push", lambda self, keys, values, **given: real(self, keys, values, **{**given, "lr_scale": 0.999})
    )


def _difference_sent_twice(patch: pytest.MonkeyPatch) -> None:
    real = Table.add
    patch.setattr(Table, "add", lambda self, keys, deltas, **given: real(self, keys, 2 * deltas, **given))


def _state_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Rows move to other servers without their optimizer state."""
    real = resharding._parts

    def bare(records: Any, *given: Any) -> Any:
        for index, part in real(records, *given):
            if part.dtype.names and "state" in part.dtype.names:
                part["state"] = 0
            yield index, part

    patch.setattr(resharding, "_parts", bare)


def _units_forgotten(patch: pytest.MonkeyPatch) -> None:
    """After a restart the server believes that it has applied one step less."""
    real = State.load_head

    def load(self: State, head: dict[str, Any]) -> None:
        real(self, head)
        self.units = UnitSet(max(0, self.units.watermark - self.spec.shares))

    patch.setattr(State, "load_head", load)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "weights ignored": (_weights_ignored, "sync, adagrad"),
    "last share wins": (_last_share_wins, "sync, adagrad"),
    "a share lost": (_share_lost, "sync, adagrad"),
    "another rate": (_epsilon_for_rate, "sync, adagrad"),
    "no discount": (_no_discount, "async, free"),
    "late by one": (_late_by_one, "async, free"),
    "a share as a step": (_share_as_a_step, "async, free"),
    "adam as fast": (_adam_as_fast, "async, free"),
    "difference twice": (_difference_sent_twice, "geo, K = 1"),
    "state left behind": (_state_left_behind, "resume"),
    "units forgotten": (_units_forgotten, "resume"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, by = MUTATIONS[name]
    plant(monkeypatch)
    found = checks(tmp_path)
    assert not found[by].ok
    assert found[by].finding is not None


def test_a_schedule_has_each_unit_pulled_and_pushed_once() -> None:
    events = schedule(20, workers=3, seed=1)
    for is_push in (False, True):
        assert sorted(event.unit for event in events if event.is_push == is_push) == list(range(20))
    order = [(event.unit, event.is_push) for event in events]
    assert all(order.index((unit, False)) < order.index((unit, True)) for unit in range(20))
