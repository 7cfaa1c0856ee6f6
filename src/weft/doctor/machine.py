"""The machine that probes read: files below a root folder, commands, environment variables.

A test is a folder with files and recorded outputs of commands; nothing else reaches the system.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_COMMAND_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class CommandOutput:
    """What a command printed (both streams), and its exit code; `timed_out` if it did not end."""

    text: str
    code: int = 0
    timed_out: bool = False


Runner = Callable[[Sequence[str]], "CommandOutput | None"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`run` returns None for a command that is not installed. `sites`: folders of installed Python packages."""

    root: Path
    run: Runner
    environment: Mapping[str, str]
    folder: Path  # of the run, absolute
    sites: tuple[Path, ...] = ()
    measure_disk: Callable[[Path], dict[str, Any]] | None = None  # recorded figures instead of a measurement
    python: str = field(default_factory=lambda: sys.version.split()[0])

    def text(self, path: str) -> str | None:
        """The content of a file without blanks around it; None if it is not there or not readable."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """The sorted names in a folder; empty if it is not there."""
        try:
            return sorted(os.listdir(self.root / path.lstrip("/")))
        except OSError:
            return []

    def has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def bytes_of(self, path: str) -> int:
        try:
            return (self.root / path.lstrip("/")).stat().st_size
        except OSError:
            return 0

    def existing_folder(self) -> Path:
        """The run's folder, or the nearest one above it that exists."""
        folders = (self.folder, *self.folder.parents)
        return next((folder for folder in folders if (self.root / str(folder).lstrip("/")).is_dir()), Path("/"))

    def output(self, command: str) -> str | None:
        """The output of a command that succeeded."""
        result = self.run(command.split())
        return result.text if result is not None and result.code == 0 and not result.timed_out else None


def this_machine(folder: Path) -> Machine:
    sites = tuple(Path(entry) for entry in sys.path if entry.endswith("-packages") and Path(entry).is_dir())
    return Machine(root=Path("/"), run=run_command, environment=dict(os.environ), folder=folder.absolute(), sites=sites)


def run_command(command: Sequence[str]) -> CommandOutput | None:
    """Run a command without input, in the C locale, for at most 20 s."""
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"}
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CommandOutput("", code=-1, timed_out=True)
    except OSError:
        return None
    return CommandOutput(done.stdout.decode("utf-8", errors="replace"), code=done.returncode)
