"""A dry run in a separate process: `python -m weft.dryrun run.toml plan.toml answer.json [gpu]`.

It runs at the lowest priority, so as not to slow down a training beside it. The answer is written atomically; an error
is an answer too: {"error": {...}}.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.quiet import quiet_libraries
from weft.core.run_spec import RunSpec

LOWEST = 19


def main(run_path: str, plan_path: str, answer_path: str, *options: str) -> None:
    os.nice(LOWEST)
    quiet_libraries()
    answer = _answer(RunSpec.from_file(run_path), Plan.from_file(plan_path), on_gpu="gpu" in options)
    draft = Path(answer_path).with_suffix(".tmp")
    draft.write_text(json.dumps(answer), encoding="utf-8")
    draft.replace(answer_path)


def _answer(run: RunSpec, plan: Plan, *, on_gpu: bool) -> dict[str, Any]:
    from weft.dryrun.run import dry_run

    # the first and last stages of a pipeline use most memory; traffic is reported for rank 0, as in a training
    last = (plan.mesh.pp - 1) * (plan.num_ranks // plan.mesh.pp)
    try:
        found = [dry_run(run, plan, rank=rank, on_gpu=on_gpu) for rank in sorted({0, last})]
    except WeftError as error:
        return {"error": error.as_dict()}
    fullest = max(found, key=lambda one: one.peak_bytes)
    elapsed_s = sum(one.elapsed_s for one in found)
    return replace(fullest, traffic=found[0].traffic, flops=found[0].flops, elapsed_s=elapsed_s).as_dict()


if __name__ == "__main__":
    main(*sys.argv[1:])
