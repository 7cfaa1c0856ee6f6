"""Recording of a pipeline: compare the ranks' clocks, time the first steps, gather the times at the end of the run.

Ranks of one host share a clock. Clocks of other hosts are aligned at the end of an all-reduce, so bars of two hosts may
be off by its latency (usually under a millisecond). Nothing is sent during a step.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from weft.engine.engine import Engine
from weft.engine.pp.runtime import PipelineRuntime
from weft.engine.pp.schedule_runner import ScheduleRunner
from weft.schedule import Schedule, Timeline
from weft.train.ledger.measuring import MAX_STEPS
from weft.train.pipeline.record import PipelineRecord, WatchedStep

WATCHED_STEPS = MAX_STEPS + 4  # includes steps that the memory measurement does not slow down
CLOCK_ROUNDS = 5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PipelineWatch:
    """Records this rank's pipeline, if it has one. The constructor and `gather` are collective."""

    def __init__(self, engine: Engine) -> None:
        pipeline = PipelineRuntime.of(engine)
        self._engine, self._runner = engine, pipeline.schedule_runner if pipeline is not None else None
        self._first_step = engine.steps_done + 1
        self._shift_s, self._is_one_clock = 0.0, True
        if self._runner is not None:
            self._shift_s, self._is_one_clock = _compare_clocks(self._runner, engine.device)
            self._runner.watch(WATCHED_STEPS, num_disturbed=MAX_STEPS)

    def gather(self, *, num_measured: int) -> PipelineRecord | None:
        """The record of this rank's pipeline, on each of its ranks. `num_measured`: steps slowed by measuring."""
        if self._runner is None:
            return None
        own = _pack(self._runner, shift_s=self._shift_s, num_measured=num_measured)
        found = [
            _Packed(self._runner.watched_schedule, row) for row in _gathered(own, self._runner, self._engine.device)
        ]
        num_steps = min(packed.num_steps for packed in found)
        if num_steps == 0:
            return None
        disturbed = max(1, *(packed.num_measured for packed in found))
        first = self._first_step
        if self._engine.updates.is_delayed:  # one span of several steps, after those
            first, disturbed = first + MAX_STEPS, 0
        steps = [
            self._step(found, index, step=first + index, is_disturbed=index < disturbed) for index in range(num_steps)
        ]
        held = tuple(max(counts) for counts in zip(*(packed.in_flight for packed in found), strict=True))
        ranks = self._engine.topology.pp_ranks
        return PipelineRecord(steps=tuple(steps), most_in_flight=held, ranks=ranks, is_one_clock=self._is_one_clock)

    def _step(self, found: Sequence[_Packed], index: int, *, step: int, is_disturbed: bool) -> WatchedStep:
        times = [packed.times(index, place) for place, packed in enumerate(found)]
        schedule = found[0].schedule
        asked, starts, ends = (tuple(tuple(marks[way] for marks in actions) for actions in times) for way in range(3))
        timeline = Timeline(schedule=schedule, starts=starts, ends=ends)
        return WatchedStep(step=step, timeline=timeline, asked=asked, is_disturbed=is_disturbed)


class _Packed:
    """One rank's numbers as a tensor: watched steps, measured steps; in flight by stage; then [step, action, mark]."""

    def __init__(self, schedule: Schedule, numbers: torch.Tensor) -> None:
        self.schedule = schedule
        num_counts = 2 + schedule.num_stages
        self.num_steps, self.num_measured, *self.in_flight = map(int, numbers[:num_counts].tolist())
        self._marks = numbers[num_counts:].view(max(1, self.num_steps), -1, 3)

    def times(self, index: int, place: int) -> list[list[float]]:
        """[action, mark]"""
        found: list[list[float]] = self._marks[index, : len(self.schedule.ranks[place])].tolist()
        return found


def _pack(runner: ScheduleRunner, *, shift_s: float, num_measured: int) -> torch.Tensor:
    most = max(map(len, runner.watched_schedule.ranks))
    marks = torch.zeros(max(1, len(runner.watched)), most, 3, dtype=torch.float64)
    for index, record in enumerate(runner.watched):
        rows = [row[1:] for row in record.rows()]
        marks[index, : len(rows)] = torch.tensor(rows, dtype=torch.float64) + shift_s
    held = torch.zeros(runner.schedule.num_stages, dtype=torch.float64)
    for record in runner.watched:
        for stage, count in record.most_in_flight.items():
            held[stage] = max(int(held[stage]), count)
    head = [len(runner.watched), num_measured]
    return torch.cat([torch.tensor(head, dtype=torch.float64), held, marks.flatten()])


def _gathered(own: torch.Tensor, runner: ScheduleRunner, device: torch.device) -> list[torch.Tensor]:
    """The tensors of all ranks of the pipeline, in pp order."""
    sent = own.to(device)
    rows = [torch.empty_like(sent) for _ in runner.links.ranks]
    dist.all_gather(rows, sent, group=runner.links.down)
    return [row.cpu() for row in rows]


def _compare_clocks(runner: ScheduleRunner, device: torch.device) -> tuple[float, bool]:
    """The shift from this rank's clock to that of the first pp rank, and whether all ranks share one clock."""
    shifts, hosts = [], []
    for _ in range(CLOCK_ROUNDS):
        token = torch.zeros(1, dtype=torch.float64, device=device)
        dist.all_reduce(token, group=runner.links.down)
        token.item()  # waits for the device
        own = torch.tensor([time.perf_counter(), _host()], dtype=torch.float64)
        rows = _gathered(own, runner, device)
        shifts.append(float(rows[0][0] - own[0]))
        hosts = [row[1].item() for row in rows]
    is_same_host = hosts[0] == hosts[runner.links.place]
    return (0.0 if is_same_host else statistics.median(shifts)), len(set(hosts)) == 1


def _host() -> float:
    """An identifier of the host that is exact in float64. Several containers may share a host name."""
    name = _BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.exists() else platform.node()
    return float(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]))
