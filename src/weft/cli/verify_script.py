"""`weft verify --script`: starts the ranks of each run of a user's script; `verify.script.session` says which runs."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.core.errors import BadValueError, WeftError

if TYPE_CHECKING:
    from weft.verify.script.session import RunSettings
    from weft.verify.script.trace import ScriptRun
    from weft.verify.verdict import Verdict

SHOWN_LINES = 20  # of a failed rank's output


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    script: Path
    arguments: Sequence[str]
    num_ranks: int
    steps: int


def verify_script(request: ScriptRequest) -> Verdict:
    """Run the script three or four times; the verdict."""
    if not request.script.is_file():
        raise BadValueError(f"there is no script {request.script}", hint="--script takes a Python file")
    if request.num_ranks < 2:
        raise BadValueError("--script compares several ranks with one process", hint="add --nproc 2 or more")
    from weft.verify.script.session import verify_runs

    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:

        def start(settings: RunSettings) -> ScriptRun:
            return _run(request, Path(scratch), settings)

        return verify_runs(start, name=request.script.name, num_ranks=request.num_ranks, steps=request.steps)


def _run(request: ScriptRequest, scratch: Path, settings: RunSettings) -> ScriptRun:
    from weft.launch.local import launch
    from weft.verify.script.trace import read_run

    num_ranks, folder = settings.num_ranks, scratch / f"run-{len(list(scratch.iterdir()))}"
    folder.mkdir()
    fields = {
        "folder": str(folder),
        "script": str(request.script.resolve()),
        "arguments": list(request.arguments),
        "steps": settings.steps,
        "batch_scale": settings.batch_scale,
        "perturbed": settings.perturbed,
    }
    path = folder / "request.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "weft.verify.script", str(path)]
        launch(command, num_ranks=num_ranks, scratch=folder / "launch", imports=["weft.verify.script.hooks"])
    except WeftError:
        _print_output(folder)
        raise
    run = read_run(folder)
    if len(run.ranks) < num_ranks or not run.num_steps:
        raise BadValueError(
            f"{request.script.name} made no optimizer step on {num_ranks} rank{'s'[: num_ranks > 1]}",
            hint="steps are seen through torch.optim.Optimizer.step",
        )
    return run


def _print_output(folder: Path) -> None:
    """The last lines that the first rank with any wrote."""
    for path in sorted(folder.glob("output-*.txt")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            print("\n".join(lines[-SHOWN_LINES:]), file=sys.stderr)
            return
