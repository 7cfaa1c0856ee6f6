"""`Job`: the description of a training run for its ranks - run, plan, folder, and whether to resume.

Ranks read it from a JSON file. The plan is stored as tables: each rank, which knows its device, resolves open choices
(precision and kernels on a GPU).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from weft.core.open_choices import plan_on
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec

DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Job:
    run: RunSpec
    plan_tables: dict[str, Any]
    out: Path
    resume: bool = False
    device: DeviceChoice = "auto"
    quiet: bool = False  # no output, no report
    may_change: tuple[str, ...] = ()  # keys of run.toml that a resume may change: those that --set names
    is_locked: bool = False  # the launcher holds the lock of the folder
    dry_run_follows: bool = False  # the launcher adds the dry run's column and then draws the report

    @staticmethod
    def create(
        *,
        run: RunSpec,
        plan_tables: dict[str, Any],
        out: str | Path | None = None,
        resume: bool = False,
        device: DeviceChoice = "auto",
        quiet: bool = False,
        may_change: Sequence[str] = (),
    ) -> Job:
        folder = Path(out) if out is not None else default_folder(run)
        return Job(
            run=run,
            plan_tables=plan_tables,
            out=folder.absolute(),
            resume=resume,
            device=device,
            quiet=quiet,
            may_change=tuple(may_change),
        )

    def plan(self, *, device_type: str) -> Plan:
        """The plan with every open choice resolved."""
        return plan_on(self.plan_tables, on_gpu=device_type == "cuda")

    def to_json(self) -> str:
        return json.dumps(
            {
                "run": self.run.model_dump(mode="json", exclude_none=True),
                "plan": self.plan_tables,
                "out": str(self.out),
                "resume": self.resume,
                "device": self.device,
                "quiet": self.quiet,
                "may_change": list(self.may_change),
                "is_locked": self.is_locked,
                "dry_run_follows": self.dry_run_follows,
            }
        )

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        return Job(
            run=RunSpec.from_tables(fields["run"]),
            plan_tables=fields["plan"],
            out=Path(fields["out"]),
            resume=fields["resume"],
            device=fields["device"],
            quiet=fields["quiet"],
            may_change=tuple(fields.get("may_change", ())),
            is_locked=fields.get("is_locked", False),
            dry_run_follows=fields.get("dry_run_follows", False),
        )


def default_folder(run: RunSpec) -> Path:
    """runs/<model>-<time>: a new name per start."""
    name = run.model.type or Path(str(run.model.path)).name
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
