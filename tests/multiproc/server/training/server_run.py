"""A driver in a process of its own, for tests that kill its children or it: `server_run.py OUT RUN.json [--resume]`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from weft.core.errors import WeftError
from weft.core.server_spec import ServerRun
from weft.server.clicks.task import ClickTask, open_log
from weft.server.job.driver import run_job


class _Unlucky(ClickTask):
    """A server dies just when the driver wants to read from it."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        victims = [pid for pid, command in children_of(os.getpid()) if "weft.server.main\0server" in command]
        os.kill(victims[0], signal.SIGKILL)
        return super().evaluate(model)


def build(run: ServerRun) -> _Unlucky:
    return _Unlucky(run, open_log(run, Path()))


def children_of(pid: int) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                yield int(entry.name), (entry / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue


def main(out: Path, tables: Path, *, resume: bool) -> int:
    try:
        run_job(ServerRun.from_tables(json.loads(tables.read_text())), out, resume=resume)
    except WeftError as error:
        print(f"error [{error.code}]: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), resume="--resume" in sys.argv))
