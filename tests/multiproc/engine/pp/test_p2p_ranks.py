"""P2P exchange between real ranks, as an engine sets it up: tensors held, and receives posted ahead."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

from gloo_ranks import run_ranks
from tiny import build_engine, global_batch
from torch import Tensor

from weft.engine.pp.p2p import Message, P2PExchange

CUTS = 4
PLAN: dict[str, Any] = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": CUTS}}


def watched_step(rank: int, world: int) -> tuple[list[int], list[list[int]]]:
    """In the second step, when shapes are known: micro-batches whose message was on its way here before it was needed,
    and after each that came, those whose own message is still held."""
    engine = build_engine("llama", PLAN)
    engine.step(global_batch(0))
    early: list[int] = []
    held: list[list[int]] = []
    sent: dict[int, weakref.ref[Tensor]] = {}
    send, receive = P2PExchange.send, P2PExchange.receive

    def seen_send(p2p: P2PExchange, message: Message, tensor: Tensor) -> None:
        sent[message.microbatch] = weakref.ref(tensor)
        send(p2p, message, tensor)

    def seen_receive(p2p: P2PExchange, message: Message, **given: Any) -> Tensor:
        early.extend([message.microbatch] if message in p2p._arriving else [])
        found = receive(p2p, message, **given)
        held.append([number for number, tensor in sent.items() if tensor() is not None])
        return found

    with mock.patch.object(P2PExchange, "send", seen_send), mock.patch.object(P2PExchange, "receive", seen_receive):
        engine.step(global_batch(1))
    return early, held


def test_ranks_hold_little_and_ask_ahead() -> None:
    (early, held), (early_last, held_last) = run_ranks(watched_step, 2)
    assert early == early_last == [1, 2, 3]  # the first message of a step cannot be
    # rank 0: F0 F1 B0 F2 B1 F3 B2 B3; what rank 1 took before it sent B n is gone
    assert held == [[1], [2], [3], []]
    # rank 1: F0 B0 F1 B1 …; rank 0 takes B n before it makes F n+2
    assert held_last == [[], [0], [1], [2]]
