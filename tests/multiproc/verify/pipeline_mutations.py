"""Realistic bugs of pipelines, as `mutations` has those of data parallelism: each trains, and wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from mutations import replaced

import weft.engine.engine
from weft.engine.activations import dropout
from weft.engine.activations.split_backward import SplitBackward
from weft.engine.kernels import head_loss
from weft.engine.pp import delayed_updates
from weft.engine.pp.no_flush_runner import NoFlushRunner
from weft.engine.pp.p2p import Message, P2PExchange
from weft.engine.pp.schedule_runner import ScheduleRunner
from weft.engine.pp.shared_weights import SharedWeights
from weft.engine.pp.stages import _Entry
from weft.engine.pp.weight_stash import WeightStash


def _first_two_swapped(message: Message) -> Message:
    return message._replace(microbatch=1 - message.microbatch) if message.microbatch < 2 else message


def microbatches_swapped_at_one_stage() -> Any:
    """The second stage gives the first activation the second micro-batch's labels, and the other way round."""

    def make(original: Any) -> Any:
        def receive(self: P2PExchange, message: Message, **given: Any) -> torch.Tensor:
            swapped = _first_two_swapped(message) if message.way == "forward" else message
            return original(self, swapped, **given)  # type: ignore[no-any-return]

        return receive

    return replaced(P2PExchange, "receive", make)


def gradient_rows_reversed() -> Any:
    """The first stage goes back with the gradients of other rows."""

    def make(original: Any) -> Any:
        def send(self: P2PExchange, message: Message, tensor: torch.Tensor, **given: Any) -> None:
            original(self, message, tensor.flip(0) if message.way == "backward" else tensor, **given)

        return send

    return replaced(P2PExchange, "send", make)


def stale_activation() -> Any:
    """A stage computes with what it received for the micro-batch before."""
    kept: dict[int, torch.Tensor] = {}

    def make(original: Any) -> Any:
        def receive(self: P2PExchange, message: Message, **given: Any) -> torch.Tensor:
            fresh: torch.Tensor = original(self, message, **given)
            if message.way != "forward":
                return fresh
            old, kept[message.stage] = kept.get(message.stage, fresh), fresh
            return old.detach().clone() if message.microbatch else fresh

        return receive

    return replaced(P2PExchange, "receive", make)


def tied_gradient_not_summed() -> Any:
    return replaced(SharedWeights, "begin_sum", lambda _: lambda self, parameters: [])


def tied_copy_not_loaded() -> Any:
    return replaced(SharedWeights, "broadcast", lambda _: lambda self, parameters, optimizer: None)


def tied_copy_counted_twice() -> Any:
    """The norm counts the head's copy of the table as a parameter of its own."""
    return replaced(
        weft.engine.engine,
        "global_norm",
        lambda original: (
            lambda parameters, topology, **given: original(parameters, topology, **{**given, "not_counted": ()})
        ),
    )


def norm_of_the_own_stage() -> Any:
    """Every stage clips by the norm of its own parameters."""
    return replaced(
        weft.engine.engine,
        "global_norm",
        lambda original: (
            lambda parameters, topology, **given: original(parameters, topology, **{**given, "partitioning": ()})
        ),
    )


def loss_scaled_by_the_cuts() -> Any:
    """Every micro-batch counts as if it were the whole batch."""

    def make(original: Any) -> Any:
        def train(self: ScheduleRunner, forward: Any, strategy: Any, **given: Any) -> None:
            cuts = self.schedule.num_microbatches
            original(self, lambda stage, index: forward(stage, index) * cuts, strategy, **given)

        return train

    return replaced(ScheduleRunner, "train", make)


def weights_gradients_lost() -> Any:
    """One micro-batch's weights never get their gradients."""
    calls = {"number": 0}

    def make(original: Any) -> Any:
        def run(self: SplitBackward) -> None:
            calls["number"] += 1
            if calls["number"] % 4 != 2:
                original(self)

        return run

    return replaced(SplitBackward, "run", make)


def entry_computes_once_more() -> Any:
    """The first own block is passed twice."""

    def make(original: Any) -> Any:
        def forward(self: _Entry, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            return self.block(output if isinstance(output, torch.Tensor) else output[0], *args[1:], **kwargs)

        return forward

    return replaced(_Entry, "forward", make)


def stash_off_by_one_version() -> Any:
    """A stage reads the weights of one update too early."""

    def make(original: Any) -> Any:
        return lambda self, index: max(0, original(self, index) - 1)

    return replaced(NoFlushRunner, "_version", make)


def stash_overwritten() -> Any:
    """An update writes into values that micro-batches under way have still to go back with."""

    def make(_original: Any) -> Any:
        @contextmanager
        def updating(self: WeightStash, *, lowest: int) -> Iterator[None]:
            self.forget(lowest)
            self._open(self.newest)
            yield
            self.newest += 1
            self.most = max(self.most, len({*self._leaves, self.newest}))

        return updating

    return replaced(WeightStash, "updating", make)


def update_at_the_rate_of_the_step_after() -> Any:
    """A delayed update is made with whatever learning rate there is by then."""
    return replaced(delayed_updates, "at_rate", lambda _original: lambda *_: nullcontext())


def gradients_of_two_steps_in_one() -> Any:
    """What a step has left is not taken away before the next one adds to it."""

    def make(original: Any) -> Any:
        def take_gradients(self: WeightStash, version: int) -> list[torch.Tensor | None]:
            kept = [leaf.grad for leaf in self._open(version)]
            original(self, version)
            for leaf, gradient in zip(self._open(version), kept, strict=True):
                leaf.grad = gradient
            return [None if gradient is None else gradient.clone() for gradient in kept]

        return take_gradients

    return replaced(WeightStash, "take_gradients", make)


def dropout_numbered_through() -> Any:
    """Dropout calls are counted over the blocks a stage computes, not from every block's beginning."""
    return replaced(dropout._RowDropout, "begin_block", lambda _: lambda self, index: None)


def stages_agree_after_every_step() -> Any:
    """Right numbers, and traffic that nobody promised."""

    def make(original: Any) -> Any:
        def train(self: ScheduleRunner, *args: Any, **given: Any) -> None:
            original(self, *args, **given)
            torch.distributed.all_reduce(torch.ones(64), group=self.links.down)

        return train

    return replaced(ScheduleRunner, "train", make)


def head_left_to_the_second_half() -> Any:
    """A split backward takes the head's gradient for one that waits, and nothing waits for it."""

    def make(original: Any) -> Any:
        def apply(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            return original(hidden, weight if SplitBackward.active is None else weight.detach(), *rest)  # type: ignore[no-any-return]

        return apply

    return replaced(head_loss._FusedLoss, "apply", make)
