"""Proof that a layout computes the right thing: a plan's numbers against a one-process reference, check by check.

The module is callable: `weft.verify(run, plan)` runs in ranks that exist already, or in one process. A run on parameter
servers has no plan.
"""

from __future__ import annotations

import sys
from types import ModuleType

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.server_spec import ServerRun
from weft.verify.verdict import Verdict


class _VerifyModule(ModuleType):
    """`weft.verify` is both the package and the verb."""

    def __call__(
        self, run: RunSpec | ServerRun, plan: Plan | None = None, *, steps: int = 5, as_is: bool = False
    ) -> Verdict:
        if isinstance(run, ServerRun):
            from weft.verify.server import verify_server

            return verify_server(run, steps=steps, as_is=as_is)
        from weft.verify.request import VerifyRequest
        from weft.verify.worker import run_request

        return run_request(VerifyRequest(run=run, plans=[plan or Plan()], steps=steps, as_is=as_is))[0]


sys.modules[__name__].__class__ = _VerifyModule
