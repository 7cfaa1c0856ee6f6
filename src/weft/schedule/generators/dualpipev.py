"""DualPipeV: one half of DualPipe, two stages per rank placed as a V (DeepSeek-V3, arXiv 2412.19437; DualPipe, 2025).

In its main phase every forward is paired with a full backward of the other leg, so that a runtime can overlap
communication of one with compute of the other; here they are two actions in a row. Needs 2p micro-batches.
"""

from __future__ import annotations

from collections import deque

from weft.schedule.actions import Action, Kind
from weft.schedule.size import PipelineSize, RankProgram, ScheduleSpec


class _Program(RankProgram):
    """Full and split backwards of a stage share one numbering; `pending` has the weight backwards of split ones."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: deque[tuple[int, int]] = deque()

    def forward(self, stage: int) -> None:
        self.add(Kind.F, stage)

    def backward(self, stage: int, *, split: bool = False) -> None:
        microbatch = self.add(Kind.I, stage)
        if split:
            self.pending.append((stage, microbatch))
        else:
            self.actions[-1] = Action(Kind.B, stage, microbatch)

    def weight_backward(self) -> None:
        """The oldest pending weight backward, if there is one."""
        if self.pending:
            self.actions.append(Action(Kind.W, *self.pending.popleft()))


def check(size: PipelineSize) -> list[str]:
    if size.num_microbatches >= size.num_stages:
        return []
    return [
        f"dualpipev needs at least as many micro-batches as stages, {size.num_stages}, found {size.num_microbatches}"
    ]


def rank_actions(size: PipelineSize, rank: int) -> list[Action]:
    down, up = rank, size.num_stages - 1 - rank
    to_turn = size.num_ranks - 1 - rank  # ranks between this one and the turn of the V
    program = _Program()
    _fill(program, down=down, up=up, to_turn=to_turn, rank=rank)
    for _ in range(size.num_microbatches - size.num_stages + rank + 1):
        program.forward(down)
        program.backward(up)
        program.forward(up)
        program.backward(down)
    for _ in range(to_turn):
        program.backward(up)
        program.forward(up)
        program.backward(down)
    _drain(program, down=down, up=up, to_turn=to_turn, rank=rank)
    return program.actions


def _fill(program: _Program, *, down: int, up: int, to_turn: int, rank: int) -> None:
    for _ in range(2 * to_turn):
        program.forward(down)
    for _ in range(rank + 1):
        program.forward(down)
        program.forward(up)
    for _ in range(to_turn):
        program.backward(up, split=True)
        program.weight_backward()
        program.forward(up)


def _drain(program: _Program, *, down: int, up: int, to_turn: int, rank: int) -> None:
    """The second half of the last backwards is split: their weight parts fill the gaps at the end."""
    for index in range(2 * (rank + 1)):
        program.backward(up if index % 2 == 0 else down, split=index > rank)
    for _ in range(to_turn):
        program.weight_backward()
        program.backward(down, split=True)
    while program.pending:
        program.weight_backward()


SPEC = ScheduleSpec(name="dualpipev", rank_actions=rank_actions, placement="v", virtual_stages=(2, 2), check=check)
