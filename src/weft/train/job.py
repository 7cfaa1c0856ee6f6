"""`Job`: the description of a training run for its ranks - run, resolved plan, device type, folder, whether to resume.

Ranks read it from a JSON file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.router_rules import with_capacity
from weft.core.run_spec import RunSpec
from weft.plan.resolve import resolve, with_mixture_for
from weft.train.devices import DeviceChoice, DeviceType, choose_device_type, local_devices
from weft.train.ranks.environment import given_ranks, read_local_size
from weft.zoo.hub import model_folder, with_model_files


@dataclass(frozen=True, kw_only=True)
class Job:
    run: RunSpec
    plan: Plan  # resolved
    device: DeviceType
    out: Path
    resume: bool = False
    continues: bool = False  # starts the run, or resumes the one in its folder: a job that a cluster queues again
    quiet: bool = False  # no output, no report
    may_change: tuple[str, ...] = ()  # keys of run.toml that a resume may change: those that --set names
    is_locked: bool = False  # the launcher holds the lock of the folder
    dry_run_follows: bool = False  # the launcher adds the dry run's column and then draws the report

    @staticmethod
    def create(
        *,
        run: RunSpec,
        plan_tables: dict[str, Any],
        num_ranks: int | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        continues: bool = False,
        device: DeviceChoice = "auto",
        quiet: bool = False,
        may_change: Sequence[str] = (),
        source: str = "the plan",
        has_own_model: bool = False,
    ) -> Job:
        """A job with its plan resolved and its device type chosen. `num_ranks`: as `plan.resolve` has it.

        `has_own_model`: the caller's own, which run.model does not describe."""
        is_rank = given_ranks(os.environ) is not None
        planned_ranks = num_ranks or Plan.from_tables(plan_tables, source=source).num_ranks
        local_ranks = read_local_size(os.environ) if is_rank else planned_ranks
        device_type = choose_device_type(device, local_ranks=local_ranks)

        def devices(count: int) -> str:
            return local_devices(count, device_type=device_type)

        plan = resolve(
            plan_tables,
            run,
            on_gpu=device_type == "cuda",
            num_ranks=num_ranks,
            machine=devices,
            source=source,
            has_own_model=has_own_model,
        )
        run = with_model_files(run)  # a refused plan downloads nothing
        # of the run from here on: a resume with another plan drops the same choices
        run = run.model_copy(update={"router": with_capacity(run.router, plan)})
        plan = with_mixture_for(devices, run, plan, has_own_model=has_own_model)
        folder = Path(out) if out is not None else default_folder(run)
        return Job(
            run=run,
            plan=plan,
            device=device_type,
            out=folder.absolute(),
            resume=resume,
            continues=continues,
            quiet=quiet,
            may_change=tuple(may_change),
        )

    def to_json(self) -> str:
        documents = {name: getattr(self, name).model_dump(mode="json", exclude_none=True) for name in ("run", "plan")}
        return json.dumps({**vars(self), **documents, "out": str(self.out)})

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        parsed = {"run": RunSpec.from_tables(fields["run"]), "plan": Plan.from_tables(fields["plan"])}
        return Job(**{**fields, **parsed, "out": Path(fields["out"]), "may_change": tuple(fields["may_change"])})


def imports_of(run: RunSpec) -> list[str]:
    """Modules that every rank of the run imports: of weft, and where transformers has the model's code."""
    name = run.model.type
    if run.model.path is not None:
        with contextlib.suppress(WeftError, OSError, ValueError):
            config = model_folder(run.model.path, revision=run.model.revision) / "config.json"
            name = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    place = (name or "").replace("-", "_")
    return ["weft.train.worker", *([f"transformers.models.{place}.modeling_{place}"] if place else [])]


def default_folder(run: RunSpec) -> Path:
    """runs/<model>-<time>: a new name per start."""
    name = run.model.type or Path(str(run.model.path)).name
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
