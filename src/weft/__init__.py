"""weft: weave one model across many devices, know beforehand what it costs and afterwards that it was right.

`import weft` is cheap: no torch. Each public name is imported from its room when first used.
"""

from __future__ import annotations

from weft.core.lazy_names import import_when_used

__version__ = "0.1.0"

_HOMES = {
    "Plan": "weft.core.plan",
    "RunSpec": "weft.core.run_spec",
    "StepFigures": "weft.engine.objective",
    "StepRecord": "weft.core.records",
    "WeftError": "weft.core.errors",
    "Engine": "weft.engine.engine",
    "OptimizerPolicy": "weft.engine.optim.optimizers",
    "estimate": "weft.plan.ask:estimate_plan",
    "search": "weft.plan.ask:search_plans",
    "dry_run": "weft.dryrun.run",
    "join": "weft.train.ranks.process",
    "leave": "weft.train.ranks.process",
    "server": "weft.server:",
    "train": "weft.train:",  # this and verify are modules that can be called: weft.train(run, plan)
    "verify": "weft.verify:",
}

__all__ = [
    "Engine",
    "OptimizerPolicy",
    "Plan",
    "RunSpec",
    "StepFigures",
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


__getattr__ = import_when_used(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
