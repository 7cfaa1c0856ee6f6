"""Training: build, loop, metrics, run folder. The module is callable: `weft.train(run, plan)`.

In a script of one process it trains in that process; under torchrun it joins the ranks of the job.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec


class _TrainModule(ModuleType):
    """`weft.train` is both the package and the verb."""

    def __call__(
        self, run: RunSpec | None = None, plan: Plan | None = None, *, out: str | Path | None = None, **options: Any
    ) -> dict[str, Any]:
        from weft.train.job import Job
        from weft.train.worker import run_job

        tables = plan.model_dump(mode="json", exclude_none=True) if plan else {}
        job = Job.create(run=run or RunSpec.default(), plan_tables=tables, out=out, **options)
        return run_job(job)


sys.modules[__name__].__class__ = _TrainModule
