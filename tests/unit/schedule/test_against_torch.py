"""Against torch.distributed.pipelining: the same order of compute actions on every rank, for every class torch has.

| weft             | torch                         | equal                                                  |
| ---------------- | ----------------------------- | ------------------------------------------------------ |
| gpipe, 1f1b      | ScheduleGPipe, Schedule1F1B   | order, as executed on a recording stage (1F1B: m >= p) |
| interleaved_1f1b | ScheduleInterleaved1F1B       | order                                                  |
| looped_bfs       | ScheduleLoopedBFS             | order                                                  |
| zero_bubble      | ScheduleInterleavedZeroBubble | order, at one stage a rank                             |
| zbv              | ScheduleZBVZeroBubble         | order                                                  |
| dualpipev        | ScheduleDualPipeV             | order, torch's overlapped pairs taken one by one       |

Schedule1F1B's executed order is recorded because its printed one, `_get_pipeline_order`, leaves out micro-batch 0 on
the last rank. Torch's runtime, given our rows, must also be able to place its sends and receives.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from asked import Asked, all_requests
from torch.distributed.pipelining import schedules as torch_schedules

from weft.schedule import NAMES, generate

MULTI = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
SYNCHRONOUS = [name for name in NAMES if not name.startswith("pipedream")]


def rows(schedule: Any) -> list[list[str]]:
    return [list(map(str, actions)) for actions in schedule.ranks]


def torch_rows(name: str, asked: Asked) -> list[list[str]]:
    """The compute actions that torch's class plans, rank by rank; pairs that overlap stand in a row."""
    stage = SimpleNamespace(
        num_stages=asked.p * asked.v, group_size=asked.p, group_rank=0, submod=None, stage_index=0, is_last=False
    )
    planned = MULTI[name]([stage] * asked.v, asked.m).pipeline_order
    flat: list[list[str]] = []
    for rank in range(asked.p):
        actions = [action for action in planned[rank] if action is not None]
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        flat.append([str(part) for part in parts if part.computation_type.value in "FBIW"])
    return flat


class RecordingStage:
    """Stands in for torch's stage: sends nothing, computes nothing, writes down what it was told."""

    has_backward = is_last = is_first = False

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.recorded: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.recorded.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.recorded.append(f"{self.stage_index}B{microbatch}")

    def no_messages(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, scale: int) -> None:
        pass


def executed_row(name: str, asked: Asked, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    cls = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}[name]
    monkeypatch.setattr(cls, "_initialize_stage", lambda self, *args, **kwargs: None)
    stage = RecordingStage(rank, asked.p)
    cls(stage, asked.m)._step_microbatches()
    return stage.recorded


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_a_rank_runs_in_torch_s_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in all_requests(name, most_ranks=6, most_microbatches=12):
        if name == "1f1b" and asked.m < asked.p:
            continue  # torch refuses it
        ours = rows(asked.schedule)
        assert ours == [executed_row(name, asked, rank, monkeypatch) for rank in range(asked.p)], asked


@pytest.mark.parametrize("name", sorted(MULTI))
def test_several_stages_a_rank_are_planned_in_torch_s_order(name: str) -> None:
    compared = 0
    for asked in all_requests(name, most_ranks=5, most_microbatches=12, most_stages=3):
        if name == "zero_bubble" and asked.m % max(1, asked.m // asked.p):
            continue  # torch refuses it
        assert rows(asked.schedule) == torch_rows(name, asked), asked
        compared += 1
    assert compared >= 20


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_torch_s_runtime_accepts_our_rows(name: str) -> None:
    """It checks the actions and inserts sends and receives, which fails where the orders deadlock."""
    v = 2 if name in ("zbv", "dualpipev", "interleaved_1f1b", "looped_bfs") else 1
    schedule = generate(name, num_ranks=4, num_microbatches=8, virtual_stages=v)
    actions = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in own]
        for rank, own in enumerate(schedule.ranks)
    }
    placement = torch_schedules._validate_schedule(actions, 4, 4 * v, 8)
    assert placement == dict(enumerate(schedule.stage_to_rank))
    with_messages = torch_schedules._add_send_recv(actions, placement.__getitem__, 4 * v)
    sends = [a for own in with_messages.values() for a in own if "SEND" in str(a)]
    crossings = sum(a != b for a, b in zip(schedule.stage_to_rank, schedule.stage_to_rank[1:], strict=False))
    assert len(sends) == 2 * 8 * crossings
