"""Weight versions of a stage: the backward of a micro-batch reads the values of its forward.

The optimizer updates the masters, which stay in its groups; forwards and backwards read leaves that share a version's
memory. An update of values that are still to be read moves the masters to new memory first, so a version costs a copy
only while it is kept: as many copies as the schedule's rule requires, and no more.
A leaf is a separate autograd tensor, so later writes to the masters do not invalidate its graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


class WeightStash:
    """The versions of the parameters `trained`, which are the masters. Version v includes v updates."""

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
        """Accumulated gradients that no update has taken."""
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
        """Remove and return the gradients accumulated through `version`, in the order of the masters."""
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
        """The newest version becomes version 0."""
        self._leaves.clear()
        self.newest = 0

    def _open(self, version: int) -> list[nn.Parameter]:
        if version not in self._leaves:
            if version != self.newest:
                raise RuntimeError(f"weight version {version} does not exist: {self.newest} is the newest")
            # `.data`: a leaf shares the memory, but not the version counter by which autograd detects writes
            self._leaves[version] = [nn.Parameter(master.data) for master in self.masters]
        return self._leaves[version]
