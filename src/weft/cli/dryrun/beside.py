"""The dry run beside a training: rank 0's step on fake tensors, in its own process, for the ledger's column.

It never fails the training or delays it by more than WAIT_S: a missing answer is a remark in the ledger.

    with DryRunBeside(job) as beside:
        ...                                 # train
        beside.join(RunFolder(job.out))     # waits at most WAIT_S
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.train.folder.run_folder import RunFolder
    from weft.train.job import Job

WAIT_S = 60.0
END_S = 5.0
# The launcher's environment of a rank; the dry run is not a rank.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_SCRATCH")


class DryRunBeside:
    """Starts with the `with` block and is stopped at its end, finished or not."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._scratch = tempfile.TemporaryDirectory(prefix="weft-dryrun-")
        self._process: subprocess.Popen[bytes] | None = None
        self._start_error = ""

    def __enter__(self) -> DryRunBeside:
        try:
            self._process = self._start()
        except OSError as error:
            self._start_error = f"no dry run: it could not be started ({error})"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._scratch.cleanup()

    def join(self, folder: RunFolder) -> None:
        """Write the column into the folder's ledger, or the reason why there is none."""
        from weft.train.worker import join_dry_run

        was_stopped = folder.read_ledger().get("run", {}).get("status") == "stopped"
        answer, remark = self._answer(wait_s=0.0 if was_stopped else WAIT_S)
        join_dry_run(folder, dry=answer, remark=remark, is_speaking=not self._job.quiet)

    def _start(self) -> subprocess.Popen[bytes]:
        run, plan, answer, output_path = (
            self._path(name) for name in ("run.toml", "plan.toml", "answer.json", "output.txt")
        )
        run.write_text(self._job.run.to_toml(), encoding="utf-8")
        plan.write_text(self._job.plan.to_toml(), encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        command = [sys.executable, "-m", "weft.dryrun", str(run), str(plan), str(answer)]
        with output_path.open("wb") as output:
            return subprocess.Popen(
                [*command, "gpu"] if self._job.device == "cuda" else command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C goes to the training, which then stops this process
            )

    def _answer(self, *, wait_s: float) -> tuple[dict[str, Any] | None, str]:
        if self._process is None:
            return None, self._start_error
        try:
            self._wait(wait_s)
        except subprocess.TimeoutExpired:
            return None, "no dry run: the training ended first"
        except KeyboardInterrupt:
            return None, "no dry run: it was interrupted"
        try:
            answer: dict[str, Any] = json.loads(self._path("answer.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None, f"no dry run: it ended with code {self._process.returncode} ({self._last_line()})"
        if "error" in answer:
            return None, f"no dry run: {answer['error']['message']}"
        return answer, ""

    def _wait(self, wait_s: float) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        if wait_s and not self._job.quiet:
            print(f"waiting for the dry run, at most {wait_s:.0f}s", file=sys.stderr, flush=True)
        process.wait(wait_s)

    def _last_line(self) -> str:
        lines = self._path("output.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def _path(self, name: str) -> Path:
        return Path(self._scratch.name) / name
