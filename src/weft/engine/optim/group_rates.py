"""Learning rates of parameter groups: a schedule sets one rate, and each group keeps its ratio to it.

    rate of a group = requested rate * (the group's rate at construction / the base rate)

The base rate is that of the first group with a rate above zero. A group at zero stays there. Groups of
`[[train.groups]]` have their ratio written in them (RATIO): the same on every pipeline stage, whichever group is first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from weft.core.errors import BadValueError
from weft.engine.optim.optimizers import RATIO, set_group_rate


class GroupRates:
    """The rates of one optimizer, as built."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        rates = current_rates(optimizer)
        self._leading = next((index for index, rate in enumerate(rates) if rate), 0)
        written = [float(group[RATIO]) for group in optimizer.param_groups if RATIO in group]
        self._is_written = bool(rates) and len(written) == len(rates)
        self.base = rates[self._leading] or 1.0
        if self._is_written and rates[self._leading]:
            self.base /= written[self._leading]
        self._ratios = [rate / self.base for rate in rates] if any(rates) else [1.0] * len(rates)
        self._asked: float | None = None
        if self._is_written:
            self._ratios = written

    @property
    def rate(self) -> float:
        """The rate that a schedule sets: the leading group's, or the run's where ratios are written."""
        if self._asked is not None:
            return self._asked
        return self.base if self._is_written else current_rates(self._optimizer)[self._leading]

    def set(self, learning_rate: float) -> None:
        self._asked = learning_rate if self._is_written else None
        groups = self._optimizer.param_groups
        # groups added later keep the ratio of their first rate
        self._ratios += [float(group["lr"]) / self.base for group in groups[len(self._ratios) :]]
        for group, ratio in zip(groups, self._ratios, strict=True):
            set_group_rate(group, learning_rate * ratio)


def current_rates(optimizer: Optimizer) -> list[float]:
    """One rate per group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


@contextmanager
def at_rate(optimizer: Optimizer, rates: Sequence[float]) -> Iterator[None]:
    """Other learning rates, one per group, for one update."""
    before = current_rates(optimizer)
    _set_all(optimizer, rates)
    yield
    _set_all(optimizer, before)


def require_one_base(rates: GroupRates, *, device: torch.device) -> None:
    """Every pipeline stage builds an optimizer: with another leading group it would train at another rate than the
    same parameters on one rank. Collective."""
    bases = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(bases, torch.tensor(rates.base, dtype=torch.float64, device=device))
    found = sorted({float(base) for base in bases})
    if len(found) > 1:
        raise BadValueError(
            f"the first parameter group has learning rate {found[0]:g} on some ranks and {found[-1]:g} on others",
            hint="give every rank the same groups in the same order, including groups without parameters on that rank",
        )


def _set_all(optimizer: Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_group_rate(group, rate)
