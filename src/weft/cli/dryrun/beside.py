"""The dry run beside a training: rank 0's step on fake tensors, in a process of its own, for the ledger's column.

It never makes a training fail or wait long: an answer that does not come is a remark in the ledger.

    with DryRunBeside(job, on_gpu=...) as beside:
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
    from weft.train.job import Job
    from weft.train.run_folder import RunFolder

WAIT_S = 60.0
END_S = 5.0
# A launcher's words to its ranks; the dry run is not one of them.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_SCRATCH")


class DryRunBeside:
    """Begins with the `with` block and is ended with it, done or not."""

    def __init__(self, job: Job, *, on_gpu: bool) -> None:
        self._job, self._on_gpu = job, on_gpu
        self._scratch = tempfile.TemporaryDirectory(prefix="weft-dryrun-")
        self._process: subprocess.Popen[bytes] | None = None
        self._why_not = ""

    def __enter__(self) -> DryRunBeside:
        try:
            self._process = self._start()
        except OSError as error:
            self._why_not = f"no dry run: it could not be started ({error})"
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
        """The column into the folder's ledger, or the reason why there is none."""
        from weft.train.worker import join_dry_run

        was_stopped = folder.read_ledger().get("run", {}).get("status") == "stopped"
        answer, remark = self._answer(wait_s=0.0 if was_stopped else WAIT_S)
        join_dry_run(folder, dry=answer, remark=remark, is_speaking=not self._job.quiet)

    def _start(self) -> subprocess.Popen[bytes]:
        run, plan, answer, said = (self._path(name) for name in ("run.toml", "plan.toml", "answer.json", "said.txt"))
        run.write_text(self._job.run.to_toml(), encoding="utf-8")
        device_type = "cuda" if self._on_gpu else "cpu"
        plan.write_text(self._job.plan(device_type=device_type).to_toml(), encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        command = [sys.executable, "-m", "weft.dryrun", str(run), str(plan), str(answer)]
        with said.open("wb") as output:
            return subprocess.Popen(
                [*command, "gpu"] if self._on_gpu else command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # an interrupt is the training's, which then ends this
            )

    def _answer(self, *, wait_s: float) -> tuple[dict[str, Any] | None, str]:
        if self._process is None:
            return None, self._why_not
        try:
            self._wait(wait_s)
        except subprocess.TimeoutExpired:
            return None, "no dry run: the training was over before it"
        except KeyboardInterrupt:
            return None, "no dry run: it was interrupted"
        try:
            answer: dict[str, Any] = json.loads(self._path("answer.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None, f"no dry run: it ended with code {self._process.returncode} ({self._last_words()})"
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

    def _last_words(self) -> str:
        lines = self._path("said.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _path(self, name: str) -> Path:
        return Path(self._scratch.name) / name
