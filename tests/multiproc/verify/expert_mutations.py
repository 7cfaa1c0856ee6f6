"""Realistic bugs of expert parallelism, as `mutations` has those of data parallelism: each trains, and wrongly."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from mutations import replaced
from torch import Tensor

import weft.engine.ep.dispatch as dispatch
import weft.engine.ep.exchange as exchange
import weft.engine.optim.clip
from weft.engine.ep.dispatch import Dispatcher
from weft.engine.ep.rows import RowOrder


def _with_gradient(x: Tensor, factor: float) -> Tensor:
    """`x`, with its gradient times `factor`."""
    return x * factor + (x * (1 - factor)).detach()


def expert_gradients_scaled_by_ep() -> Any:
    return _expert_gradients_times(2.0)


def expert_gradients_averaged_over_ep() -> Any:
    return _expert_gradients_times(0.5)


def _expert_gradients_times(factor: float) -> Any:
    """Of the parameters alone: those of rows and weights are right."""

    def make(original: Any) -> Any:
        def compute(experts: Any, rows: Tensor, numbers: Tensor) -> Tensor:
            return _with_gradient(original(experts, _with_gradient(rows, 1 / factor), numbers), factor)

        return compute

    return replaced(dispatch, "compute", make)


def weights_applied_twice() -> Any:
    def make(original: Any) -> Any:
        def sum_rows(values: Tensor, order: RowOrder, weights: Tensor | None = None) -> Tensor:
            return original(values, order, weights if weights is None else weights.square())  # type: ignore[no-any-return]

        return sum_rows

    return replaced(dispatch, "sum_rows", make)


def router_without_gradient() -> Any:
    def make(original: Any) -> Any:
        def send(experts: Tensor, weights: Tensor, *others: Any) -> Any:
            return original(experts, weights.detach(), *others)

        return send

    return replaced(dispatch, "send_routing", make)


def scales_off_by_one_power() -> Any:
    """Rows that travel in float8 arrive twice as large."""

    def make(original: Any) -> Any:
        def unpacked(*args: Any) -> Tensor:
            return original(*args) * 2  # type: ignore[no-any-return]

        return unpacked

    return replaced(exchange, "unpacked", make)


def counts_of_experts_swapped() -> Any:
    """Sizes of the exchanges are right, the experts of the received rows are not."""
    return replaced(dispatch, "exchange_counts", lambda original: lambda *args: original(*args).flip(1))


def owner_off_by_one() -> Any:
    """The next rank computes with its expert of the same local number."""

    def make(original: Any) -> Any:
        def owners(self: Dispatcher, index: Tensor) -> Tensor:
            return (original(self, index) + 1) % self.degree  # type: ignore[no-any-return]

        return owners

    def local_numbers(self: Dispatcher, index: Tensor) -> Tensor:
        return index % self.own.size

    owners = replaced(Dispatcher, "owners", make)
    numbers = replaced(Dispatcher, "local_numbers", lambda _: local_numbers)
    return _both(owners, numbers)


def local_number_off_by_one() -> Any:
    def make(original: Any) -> Any:
        def local_numbers(self: Dispatcher, index: Tensor) -> Tensor:
            return (original(self, index) + 1) % self.own.size  # type: ignore[no-any-return]

        return local_numbers

    return replaced(Dispatcher, "local_numbers", make)


def order_not_restored() -> Any:
    """Returned rows are added to the tokens of another order."""

    def make(original: Any) -> Any:
        def sum_rows(values: Tensor, order: RowOrder, weights: Tensor | None = None) -> Tensor:
            return original(values, RowOrder(order.slots, order.rows.flip(0)), weights)  # type: ignore[no-any-return]

        return sum_rows

    return replaced(dispatch, "sum_rows", make)


def norm_without_experts_of_other_ranks() -> Any:
    def make(original: Any) -> Any:
        def sum_over(value: Tensor, group: Any) -> None:
            if group.group_desc != "expert parallel":
                original(value, group)

        return sum_over

    return replaced(weft.engine.optim.clip, "sum_over", make)


def _both(*contexts: Any) -> Any:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
