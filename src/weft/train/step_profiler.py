"""The steps that [profile] names, recorded by torch's profiler: a trace per rank, the largest operators, and on a GPU
the allocator's history. One step before the first is the profiler's warm-up.

    profile/trace-rank0.json.gz     for Perfetto, chrome://tracing, or TensorBoard
    profile/memory-rank0.pickle     for pytorch.org/memory_viz; GPUs only
    profile/operators.json          of rank 0: time and calls of the largest operators, for the report
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from weft.core.loop_spec import ProfileSpec
from weft.train.folder.run_folder import write_json

FOLDER = "profile"
OPERATORS = "operators.json"
LARGEST = 25  # operators in the report
_HISTORY = 200_000  # events of the allocator that are kept


class StepProfiler:
    """Wraps every step of the loop; records those of the spec on the ranks that it names."""

    def __init__(self, spec: ProfileSpec, folder: Path, *, rank: int, device: torch.device) -> None:
        self._spec, self._folder, self._rank, self._device = spec, folder / FOLDER, rank, device
        self._is_on = spec.first_step > 0 and (rank == 0 or spec.ranks == "all")
        self._recorder: Any = None
        self.written: tuple[str, ...] = ()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step, with the reading of its batch."""
        first, last = self._spec.first_step, self._spec.last_step
        if not self._is_on or not first - 1 <= step <= last:
            yield
            return
        self._begin(step)
        with record_function(f"step {step}"):
            yield
        if step == last and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels of the step are still in flight
        self._recorder.step()  # after the last one: stops, and calls `_write`

    def close(self) -> None:
        """Write what was recorded, also of a run that ends within the steps."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()

    def _begin(self, step: int) -> None:
        if self._recorder is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else libkineto writes its stages to stderr
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            begun = step
            self._recorder = profile(
                activities=activities,
                schedule=lambda index: self._action(begun + index),
                on_trace_ready=self._write,
                profile_memory=self._spec.memory,
                acc_events=True,  # else torch warns that a new cycle would clear them
            )
            self._recorder.start()
        if step == self._spec.first_step and self._spec.memory and self._device.type == "cuda":
            # torch names no public function; tests/gpu/test_profile_gpu.py fails when this one moves
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)

    def _action(self, step: int) -> ProfilerAction:
        first, last = self._spec.first_step, self._spec.last_step
        if step < first:
            return ProfilerAction.WARMUP
        if step > last:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.RECORD

    def _write(self, recorder: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = f"trace-rank{self._rank}.json.gz"
        recorder.export_chrome_trace(str(self._folder / trace))
        files = [trace]
        if self._spec.memory and self._device.type == "cuda":
            memory = f"memory-rank{self._rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(self._folder / memory))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
            files.append(memory)
        if self._rank == 0:
            write_json(self._folder / OPERATORS, self._operators(recorder))
        self.written = tuple(f"{FOLDER}/{name}" for name in files)

    def _operators(self, recorder: Any) -> dict[str, Any]:
        on_gpu = self._device.type == "cuda"
        rows = [
            {
                "name": row.key,
                "calls": row.count,
                "self_s": (row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1e6,
            }
            for row in recorder.key_averages()
            if not row.key.startswith(("step ", "ProfilerStep"))
        ]
        rows.sort(key=lambda row: -row["self_s"])
        total = sum(row["self_s"] for row in rows)
        return {
            "first_step": self._spec.first_step,
            "last_step": self._spec.last_step,
            "device": self._device.type,
            "total_s": total,
            "operators": rows[:LARGEST],
        }
