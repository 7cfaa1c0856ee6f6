"""Training: build, loop, metrics, run folder. The module is callable: `weft.train(run, plan)`.

The verb is `weft.launch.training.train`: in this process, on ranks that it starts, or as a rank of torchrun.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _TrainModule(ModuleType):
    """`weft.train` is both the package and the verb."""

    def __call__(self, *given: Any, **options: Any) -> dict[str, Any]:
        # the verb may start ranks, which is above this package; see `weft.launch.training.train` for its arguments
        verb = import_module("weft.launch.training").train
        ledger: dict[str, Any] = verb(*given, **options)
        return ledger


sys.modules[__name__].__class__ = _TrainModule
