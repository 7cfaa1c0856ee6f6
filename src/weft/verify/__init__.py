"""Proof that a layout computes the right thing: a plan's numbers against a one-process reference, check by check.

The room itself is callable: `weft.verify(run, plan)` in ranks that exist already, or in one process.
"""

from __future__ import annotations

import sys
from types import ModuleType

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.verify.verdict import Verdict


class _CallableRoom(ModuleType):
    """`weft.verify` is both the package and the verb."""

    def __call__(self, run: RunSpec, plan: Plan, *, steps: int = 5, as_is: bool = False) -> Verdict:
        from weft.verify.request import Request
        from weft.verify.worker import run_request

        tables = [plan.model_dump(mode="json", exclude_none=True)]
        return run_request(Request(run=run, plans=tables, steps=steps, as_is=as_is))[0]


sys.modules[__name__].__class__ = _CallableRoom
