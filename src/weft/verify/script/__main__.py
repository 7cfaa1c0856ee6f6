"""`python -m weft.verify.script request.json`: one rank that runs a script with its hooks installed.

request.json: folder, script, arguments, steps, perturbed, batch_scale
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.train.ranks.environment import SCRATCH_VARIABLE, read_process
from weft.train.ranks.failures import is_debugging, record_failure, set_phase, write_record
from weft.verify.script.hooks import install_hooks
from weft.verify.script.recorder import ScriptRecorder
from weft.verify.script.running import run_script

FAILED = 3


def main() -> None:
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    process = read_process(os.environ)
    recorder = ScriptRecorder(
        Path(request["folder"]),
        steps=request["steps"],
        rank=process.rank,
        world_size=process.world_size,
        perturbed=request["perturbed"],
        batch_scale=request["batch_scale"],
    )
    _redirect_output(Path(request["folder"]) / f"output-{process.rank}.txt")
    install_hooks(recorder)
    error = run_script(request["script"], request["arguments"])
    if error is None:
        try:
            recorder.finish()
        except Exception as raised:
            error = raised
    if error is not None:
        set_phase(error, "the script")
        write_record(record_failure(error, process=process), scratch=Path(os.environ[SCRATCH_VARIABLE]))
    if dist.is_initialized() and error is None:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else FAILED)  # no thread of the script keeps the rank alive


def _redirect_output(path: Path) -> None:
    """stdout and stderr into a file, which is shown if the script fails: --json needs stdout."""
    if is_debugging():
        os.dup2(2, 1)
        return
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


main()
