"""Measuring the first steps: what it finds, that it ends, and that its own errors are notes and not failures."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tiny import build_engine, global_batch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm.ledger import TrafficLedger
from weft.engine.engine import Engine
from weft.engine.measure.meter import StepMeter
from weft.train.ledger.measuring import MAX_STEPS, Measured, Measuring


@pytest.fixture(autouse=True)
def _nothing_frozen() -> None:
    """As in a training; the tests' own process has frozen what it imported."""
    gc.unfreeze()


def train(engine: Engine, measuring: Measuring, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        with measuring.step():
            losses.append(engine.step(global_batch(step)).loss)
    return losses


def test_two_steps_are_measured_and_no_third() -> None:
    engine, heard = build_engine("llama"), list[Measured]()
    measuring = Measuring(engine, on_found=heard.append)
    train(engine, measuring, 1)
    assert gc.get_freeze_count() > 0
    assert measuring.is_active
    assert measuring.found is not None
    assert measuring.found.peak is None
    train(engine, measuring, 3)
    assert not measuring.is_active
    assert heard == [measuring.found]
    peak = heard[0].peak
    assert peak is not None
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    assert weights <= peak.terms["weights"] < weights + 512 * len(list(engine.model.parameters()))
    assert peak.terms["activations"] > 0
    assert heard[0].flops > 0
    assert gc.get_freeze_count() == 0


def test_a_measured_run_has_the_losses_of_a_plain_one() -> None:
    on, off = build_engine("gpt2"), build_engine("gpt2")
    assert train(on, Measuring(on), 3) == train(off, Measuring(off, is_on=False), 3)


def test_switched_off_it_finds_nothing() -> None:
    engine = build_engine("llama")
    measuring = Measuring(engine, is_on=False)
    train(engine, measuring, 2)
    assert (measuring.found, measuring.notes) == (None, [])


def test_an_error_inside_an_operator_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("in the ledger\nsecond line")

    monkeypatch.setattr(TrafficLedger, "saw", broken)
    engine = build_engine("llama")
    measuring = Measuring(engine)
    assert train(engine, measuring, 3) == train(build_engine("llama"), Measuring(engine, is_on=False), 3)
    assert measuring.notes == ["measuring ended early (ZeroDivisionError: in the ledger)"]
    assert (measuring.found, measuring.is_active, gc.get_freeze_count()) == (None, False, 0)


@pytest.mark.parametrize("method", ["next_step", "measuring"])
def test_an_error_at_the_start_is_a_note(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: StepMeter) -> None:
        raise RuntimeError

    monkeypatch.setattr(StepMeter, method, broken)
    engine = build_engine("llama")
    measuring = Measuring(engine)
    train(engine, measuring, 2)
    assert measuring.notes == ["measuring ended early (RuntimeError: no message)"]


def test_steps_that_never_agree_end_it_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepMeter, "is_complete", property(lambda _: False))
    engine = build_engine("llama")
    measuring = Measuring(engine)
    train(engine, measuring, MAX_STEPS + 1)
    assert not measuring.is_active
    assert "different positions" in measuring.notes[0]
    assert measuring.found is not None


class NoMemoryFor(TorchDispatchMode):
    """The allocator fails at one operator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == self._name:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("operator", "phase"), [("aten::silu", "forward"), ("aten::silu_backward", "backward")])
def test_a_step_that_fails_says_where_and_what_was_alive(operator: str, phase: str) -> None:
    engine = build_engine("llama")
    measuring = Measuring(engine)
    with NoMemoryFor(operator), pytest.raises(torch.OutOfMemoryError):
        train(engine, measuring, 1)
    failed = measuring.failed
    assert failed is not None
    layer = 0 if phase == "forward" else 5
    assert (failed.phase, failed.module) == (phase, f"model.layers.{layer}.mlp.act_fn")
    assert {"weights", "activations"} <= {holder.term for holder in failed.holders}
    measuring.finish()
    assert gc.get_freeze_count() == 0
