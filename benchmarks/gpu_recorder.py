"""When steps began, what they lost, how much memory they took: for loops of one's own and for loops of others.

Steps are timed by CUDA events with no wait of the host between them; on a CPU by the host's clock.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch


class Recorder:
    """Told before each step. It waits for the device after the first one and before the first timed one alone."""

    def __init__(self, device: torch.device, *, warmup: int, steps: int) -> None:
        self._device, self._warmup, self._steps = device, warmup, steps
        self._marks: list[Any] = []
        self._losses: dict[int, torch.Tensor] = {}
        self._began_s = self.first_step_s = 0.0

    def before(self, index: int) -> None:
        if index == 0:
            self._began_s = time.perf_counter()
        if index == 1:
            self._wait()
            self.first_step_s = time.perf_counter() - self._began_s
        if index == self._warmup:
            self._wait()
            gc.collect()
            gc.disable()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        if self._warmup <= index <= self._warmup + self._steps:
            self._marks.append(self._mark())

    def keep_loss(self, index: int, loss: torch.Tensor) -> None:
        """The first and the last timed; a copy, since a step may write over its own."""
        if index in (0, self._warmup + self._steps - 1):
            self._losses[index] = loss.detach().clone()

    def figures(self, num_tokens: int) -> dict[str, Any]:
        self._wait()
        gc.enable()
        steps_s = [self._between_s(*pair) for pair in zip(self._marks, self._marks[1:], strict=False)]
        if len(steps_s) != self._steps:
            raise RuntimeError(f"{len(steps_s)} steps were timed where {self._steps} were asked for")
        on_gpu = self._device.type == "cuda"
        step_s = statistics.median(steps_s)
        return {
            "tokens_per_s": num_tokens / step_s,
            "step_s": step_s,
            "steps_s": steps_s,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
            "first_step_s": self.first_step_s,
            "loss_first": self._losses[0].float().item(),
            "loss_last": self._losses[self._warmup + self._steps - 1].float().item(),
        }

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between_s(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1e3
