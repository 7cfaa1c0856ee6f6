"""Measurement of the first steps of a process by the engine's meter; later steps run without it.

It never fails a run: an error of the measurement becomes a note, and the step continues. It usually takes two steps:
the first finds the position of the peak, the second classifies every live byte there. It issues no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weft.core.records import HolderRecord, PeakRecord
from weft.engine.engine import Engine
from weft.engine.measure.meter import StepMeter, collecting_new_objects

MAX_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs of one step on this rank."""

    peak: PeakRecord | None  # None until a step peaks at the position found in the step before
    traffic: list[dict[str, Any]]
    collective_s: dict[tuple[str, str], float]  # (axis, collective), if the backend reports it
    flops: int
    allocated_bytes: int  # the device allocator's peak within the step; 0 on a CPU
    before_bytes: int  # its peak before the measured steps: building and loading
    is_compiled: bool = False  # compiled blocks: only the allocator sees the memory inside them


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Live memory when a measured step failed, and the phase and module of the operator ("" without one)."""

    holders: list[HolderRecord]
    phase: str
    module: str


class Measuring:
    """`with measuring.step():` around every step; `found` is set after the first, `on_found` called when complete."""

    def __init__(
        self, engine: Engine, *, is_on: bool = True, on_found: Callable[[Measured], None] | None = None
    ) -> None:
        self.found: Measured | None = None
        self.failed: Failed | None = None
        self.notes: list[str] = []
        self.num_measured = 0  # measured steps, which are slower
        self._engine, self._on_found = engine, on_found
        self._meter: StepMeter | None = None
        self._collections = ExitStack()
        self._steps_left = MAX_STEPS if is_on else 0
        self._before_bytes = 0

    @property
    def is_active(self) -> bool:
        """Whether the next step will be measured."""
        return self._steps_left > 0

    @contextmanager
    def step(self) -> Iterator[None]:
        if not self.is_active:
            yield
            return
        stack = ExitStack()
        self.num_measured += 1
        self._guarded(lambda: self._open(stack))
        try:
            yield
        except Exception:
            self._guarded(self._record_failure)
            raise
        finally:
            self._guarded(stack.close)
        if self.is_active:  # not given up meanwhile
            self._guarded(self._close)

    def finish(self) -> None:
        """End the measurement and restore the garbage collector."""
        self._collections.close()
        self._meter, self._steps_left = None, 0

    def _open(self, stack: ExitStack) -> None:
        if self._meter is None:
            self._meter = StepMeter(self._engine, on_error=self._give_up)
            self._collections.enter_context(collecting_new_objects())
        if self._engine.device.type == "cuda":
            self._before_bytes = max(self._before_bytes, torch.cuda.max_memory_allocated(self._engine.device))
            torch.cuda.reset_peak_memory_stats(self._engine.device)
        stack.enter_context(self._meter.measuring())
        self._meter.next_step()

    def _close(self) -> None:
        meter, device = self._meter, self._engine.device
        if meter is None:
            return
        self._steps_left -= 1
        self.found = Measured(
            peak=meter.peak if meter.is_complete else None,
            traffic=meter.traffic,
            collective_s=meter.collective_seconds,
            flops=meter.flops,
            allocated_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            before_bytes=self._before_bytes,
            is_compiled=self._engine.plan.compile.enabled,
        )
        if meter.is_complete:
            self.finish()
            if self._on_found is not None:
                self._on_found(self.found)
        elif not self.is_active:
            self.notes.append(f"memory terms were not measured: {MAX_STEPS} steps peaked at different positions")
            self.finish()

    def _record_failure(self) -> None:
        if self._meter is not None:
            phase, module = self._meter.failed_in
            self.failed = Failed(holders=self._meter.holders_now(), phase=phase, module=module)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # of any kind: a measurement must not fail a run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        self.notes.append(f"measuring ended early ({type(error).__name__}: {lines[0] if lines else 'no message'})")
        self.found = None
        self.finish()
