"""weft: weave one model across many devices, know beforehand what it costs and afterwards that it was right.

`import weft` is cheap: no torch. Each public name is imported from its room when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Plan": "weft.core.plan",
    "RunSpec": "weft.core.run_spec",
    "StepRecord": "weft.core.records",
    "WeftError": "weft.core.errors",
    "Engine": "weft.engine.engine",
    "OptimizerPolicy": "weft.engine.optim",
}
_ROOMS = ("server", "train", "verify")  # train and verify are callable: weft.train(run, plan)
_FUNCTIONS = {
    "estimate": ("weft.plan.ask", "estimate_plan"),
    "search": ("weft.plan.ask", "search_plans"),
    "dry_run": ("weft.dryrun.run", "dry_run"),
    "join": ("weft.train.process", "join"),
    "leave": ("weft.train.process", "leave"),
}

__all__ = [
    "Engine",
    "OptimizerPolicy",
    "Plan",
    "RunSpec",
    "StepRecord",
    "WeftError",
    "__version__",
    "dry_run",
    "estimate",
    "join",
    "leave",
    "search",
    "server",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"weft.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _FUNCTIONS:
        home, function = _FUNCTIONS[name]
        return getattr(import_module(home), function)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
