"""DualPipeV: DualPipe cut in half, two stages a rank placed as a V (DeepSeek-V3, arXiv 2412.19437; DualPipe, 2025).

In its main phase every forward stands beside a whole backward of the other leg, so that a runtime can hide the one's
communication under the other's compute; here they are two actions in a row. Needs 2p micro-batches.
"""

from __future__ import annotations

from collections import deque

from weft.schedule.actions import Action, Kind
from weft.schedule.request import RankProgram, Request, ScheduleSpec


class _Program(RankProgram):
    """Backwards of a stage share one numbering whether whole or cut; cut ones owe a weight backward, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.owed: deque[tuple[int, int]] = deque()

    def forward(self, stage: int) -> None:
        self.add(Kind.F, stage)

    def backward(self, stage: int, *, cut: bool = False) -> None:
        microbatch = self.add(Kind.I, stage)
        if cut:
            self.owed.append((stage, microbatch))
        else:
            self.actions[-1] = Action(Kind.B, stage, microbatch)

    def pay(self) -> None:
        """The oldest weight backward that is owed, if any is."""
        if self.owed:
            self.actions.append(Action(Kind.W, *self.owed.popleft()))


def check(request: Request) -> list[str]:
    if request.num_microbatches >= request.num_stages:
        return []
    return [
        f"dualpipev needs at least as many micro-batches as stages, {request.num_stages}, "
        f"and was given {request.num_microbatches}"
    ]


def rank_actions(request: Request, rank: int) -> list[Action]:
    down, up = rank, request.num_stages - 1 - rank
    to_turn = request.num_ranks - 1 - rank  # ranks between this one and the turn of the V
    program = _Program()
    _fill(program, down=down, up=up, to_turn=to_turn, rank=rank)
    for _ in range(request.num_microbatches - request.num_stages + rank + 1):
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
        program.backward(up, cut=True)
        program.pay()
        program.forward(up)


def _drain(program: _Program, *, down: int, up: int, to_turn: int, rank: int) -> None:
    """The later half of the last backwards is cut: their weight parts wait for the gaps at the very end."""
    for index in range(2 * (rank + 1)):
        program.backward(up if index % 2 == 0 else down, cut=index > rank)
    for _ in range(to_turn):
        program.pay()
        program.backward(down, cut=True)
    while program.owed:
        program.pay()


SPEC = ScheduleSpec(name="dualpipev", rank_actions=rank_actions, placement="v", virtual_stages=(2, 2), check=check)
