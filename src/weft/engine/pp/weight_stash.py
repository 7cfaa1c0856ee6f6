"""Versions of a stage's weights: the backward of a micro-batch reads the values of its forward.

The optimizer works on the masters, which stay in its groups for ever; forwards and backwards read through leaves that
share a version's memory. An update of values that somebody will still read moves the masters to memory of their own
first, so a version costs a copy only while it is kept: as many copies as the schedule's rule says, and no more.
A leaf has an autograd identity of its own: what its version's memory becomes later is never mistaken for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


class WeightStash:
    """Of the parameters `trained`, which are the masters. Version v has seen v updates."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        self.masters = list(trained.values())
        places = {id(master): index for index, master in enumerate(self.masters)}
        self._slots = [
            (module, key, places[id(parameter)])
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in places
        ]
        self._leaves: dict[int, list[nn.Parameter]] = {}
        self.newest = 0
        self.most = 1  # versions kept at once, so far

    @property
    def older(self) -> list[Tensor]:
        """The memory of versions that are not the newest."""
        return [leaf for version, leaves in self._leaves.items() if version < self.newest for leaf in leaves]

    @property
    def gradients(self) -> list[Tensor]:
        """What backwards have left and no update has taken."""
        return [leaf.grad for leaves in self._leaves.values() for leaf in leaves if leaf.grad is not None]

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Inside, the model has the weights of `version`."""
        leaves = self._open(version)
        try:
            for module, key, index in self._slots:
                module._parameters[key] = leaves[index]
            yield
        finally:
            for module, key, index in self._slots:
                module._parameters[key] = self.masters[index]

    def take_gradients(self, version: int) -> list[Tensor | None]:
        """What backwards through `version` have left, in the order of the masters; it is gone from there."""
        leaves = self._open(version)
        taken = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return taken

    @contextmanager
    def updating(self, *, lowest: int) -> Iterator[None]:
        """Around an update in place of the masters. `lowest`: no older version than this will be read again."""
        self.forget(lowest)
        if self.newest >= lowest:
            self._open(self.newest)
            for master in self.masters:
                master.data = master.data.clone()
        yield
        self.newest += 1
        self.most = max(self.most, len({*self._leaves, self.newest}))

    def forget(self, lowest: int) -> None:
        """Free versions below `lowest`."""
        for version in [version for version in self._leaves if version < lowest]:
            del self._leaves[version]

    def restart(self) -> None:
        """The newest is the first of a new count."""
        self._leaves.clear()
        self.newest = 0

    def _open(self, version: int) -> list[nn.Parameter]:
        if version not in self._leaves:
            if version != self.newest:
                raise RuntimeError(f"weight version {version} is asked for, and {self.newest} is the newest")
            # `.data`: a leaf shares the memory, and not the counter by which autograd notices a write to it
            self._leaves[version] = [nn.Parameter(master.data) for master in self.masters]
        return self._leaves[version]
