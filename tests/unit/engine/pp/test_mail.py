"""One rank's p2p over a wire that is played here: what is held until when, what is asked for before it is needed.

As with Gloo, a message that was sent tells nobody that it has left; who waits for one that was not taken waits forever,
which is an error here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.engine.pp.p2p import Message, P2PExchange, ShapeRegistry, StageLinks
from weft.schedule import Action, Kind, generate

SHAPE = (2, 3)
CUTS = 4
CPU = torch.device("cpu")


class Sent:
    def __init__(self, wire: Wire, number: int) -> None:
        self.wire, self.number = wire, number

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        assert self.number < self.wire.num_taken, f"message {self.number} was not taken yet: this waits forever"


class Received:
    def wait(self) -> None:
        pass


class Wire:
    """The other side of the p2p: counts what was sent and what was asked for; `num_taken` is for the test to say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_sent = self.num_asked = self.num_taken = 0
        monkeypatch.setattr("torch.distributed.isend", self.isend)
        monkeypatch.setattr("torch.distributed.irecv", self.irecv)

    def isend(self, tensor: Tensor, rank: int, *, group: Any) -> Sent:
        self.num_sent += 1
        return Sent(self, self.num_sent - 1)

    def irecv(self, tensor: Tensor, rank: int, *, group: Any) -> Received:
        self.num_asked += 1
        return Received()


def mail_at(place: int, *, ahead: int) -> P2PExchange:
    """Of a rank of 1F1B over two, whose shapes are known; rank 0 does F0 F1 B0 F2 B1 F3 B2 B3, rank 1 F0 B0 F1 B1 …"""
    schedule = generate("1f1b", num_ranks=2, num_microbatches=CUTS)
    group: Any = None
    known_shapes = ShapeRegistry()
    known_shapes.given[0, SHAPE] = (SHAPE, torch.float32)
    known_shapes.expect(1, SHAPE, shape=SHAPE, dtype=torch.float32)
    line = StageLinks(ranks=(0, 1), place=place, down=group, up=group, ahead=ahead)
    p2p = P2PExchange(line, schedule.stage_to_rank, known_shapes)
    p2p.expect(schedule.ranks, dict.fromkeys(range(CUTS), SHAPE))
    return p2p


def runner(p2p: P2PExchange, place: int, after: Callable[[Action], None], before: Callable[[Action], None]) -> None:
    """The messages of a rank's actions, in order."""
    for action in generate("1f1b", num_ranks=2, num_microbatches=CUTS).ranks[place]:
        before(action)
        index = action.microbatch
        if (action.kind is Kind.F) == (place == 0):
            p2p.send(Message("forward", 1, index) if place == 0 else Message("backward", 0, index), torch.ones(SHAPE))
        else:
            p2p.receive(Message("forward", 1, index) if place == 1 else Message("backward", 0, index), device=CPU)
        after(action)
    p2p.finish()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_sent_activation_is_let_go_when_its_receiver_has_moved_on(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(monkeypatch)
    sent: list[weakref.ref[Tensor]] = []
    held: list[list[int]] = []
    send = wire.isend

    def seen(tensor: Tensor, rank: int, *, group: Any) -> Sent:
        sent.append(weakref.ref(tensor))
        return send(tensor, rank, group=group)

    def before(action: Action) -> None:
        if action.kind is Kind.B:  # rank 1 has sent B n: it took F 0 … F n, and may have taken nothing more
            wire.num_taken = action.microbatch + 1

    monkeypatch.setattr("torch.distributed.isend", seen)
    runner(
        mail_at(0, ahead=ahead),
        0,
        lambda _: held.append([number for number, tensor in enumerate(sent) if tensor() is not None]),
        before,
    )
    #               F0   F1      B0   F2      B1   F3      B2   B3
    assert held == [[0], [0, 1], [1], [1, 2], [2], [2, 3], [3], []]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_messages_are_asked_for_ahead_and_no_further(place: int, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    wire.num_taken = CUTS
    asked: list[int] = []
    is_receive = (Kind.B, Kind.F)[place]

    def after(action: Action) -> None:
        if action.kind is is_receive:
            asked.append(wire.num_asked)

    runner(mail_at(place, ahead=ahead), place, after, lambda _: None)
    assert asked == [min(number + 1 + ahead, CUTS) for number in range(CUTS)]
