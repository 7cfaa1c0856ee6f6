"""Realistic bugs of [router]: losses, biases, counts and capacity. Each trains, and wrongly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mutations import replaced
from torch import Tensor
from torch.distributed.tensor import DTensor

import weft.engine.router.capacity as capacity
import weft.engine.router.routers as routers
import weft.engine.router.sums as sums
from weft.core import axes
from weft.engine.router.routers import Routers
from weft.engine.updates import Updates


def router_losses_averaged_over_ranks() -> Any:
    def make(original: Any) -> Any:
        def begin_step(self: Routers, num_tokens: Tensor, **others: Any) -> None:
            original(self, num_tokens * dist.get_world_size(), **others)

        return begin_step

    return replaced(Routers, "begin_step", make)


def shares_of_one_rank() -> Any:
    """Each rank moves biases by its own tokens."""
    return replaced(routers, "sum_over", lambda _: lambda value, group: value)


def bias_moved_one_step_late() -> Any:
    before: dict[str, Tensor] = {}

    def make(original: Any) -> Any:
        def move_bias(model: Any, name: str, choices: Tensor, *, rate: float) -> None:
            late, before[name] = before.get(name), choices.clone()
            if late is not None:
                original(model, name, late, rate=rate)

        return move_bias

    return replaced(routers, "move_bias", make)


def one_bias_moved_the_wrong_way() -> Any:
    def make(original: Any) -> Any:
        def move_bias(model: Any, name: str, choices: Tensor, *, rate: float) -> None:
            moves = torch.sign(choices.mean() - choices)
            moves[moves.nonzero()[0]] *= -1
            original(model, name, -moves, rate=rate)

        return move_bias

    return replaced(routers, "move_bias", make)


def recomputed_choices_counted_again() -> Any:
    return replaced(sums, "is_recomputing", lambda _: lambda: False)


def expert_states_on_the_other_rank() -> Any:
    """After every update the first moments of experts are those of the other rank's experts."""

    def make(original: Any) -> Any:
        def finish_step(self: Updates) -> Any:
            found, engine = original(self), self.engine
            group = engine.topology.group(axes.EP)
            for name, shard in engine.shards.items():
                if axes.EP in shard.axis_names:
                    moment = engine.optimizer.state[engine.trained[name]]["exp_avg"]
                    local = moment.to_local() if isinstance(moment, DTensor) else moment
                    held = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(held, local.contiguous(), group=group)
                    local.copy_(held[dist.get_rank(group) - 1])
            return found

        return finish_step

    return replaced(Updates, "finish_step", make)


def drops_not_counted() -> Any:
    return replaced(capacity, "drops_of", lambda _: lambda row, num_experts: torch.zeros((), dtype=row.dtype))


def capacity_of_a_micro_batch() -> Any:
    """All sequences of a rank's micro-batch share one capacity."""

    def make(original: Any) -> Any:
        def drop(weights: Tensor, index: Tensor, row: Tensor, *, sequence_length: int, **others: Any) -> Tensor:
            return original(weights, index, row, sequence_length=len(index), **others)  # type: ignore[no-any-return]

        return drop

    return replaced(routers, "drop", make)


def latest_tokens_kept() -> Any:
    def make(original: Any) -> Any:
        def drop(weights: Tensor, index: Tensor, row: Tensor, **others: Any) -> Tensor:
            return original(weights.flip(0), index.flip(0), row, **others).flip(0)  # type: ignore[no-any-return]

        return drop

    return replaced(routers, "drop", make)
