"""`StepProgress`: a progress bar over steps on a terminal, plain lines elsewhere. Everything goes to stderr.

It is generic over steps: the caller gives a step's number, its figures as text, and its seconds.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from weft.core.units import format_seconds


class StepProgress:
    def __init__(self, *, is_speaking: bool, total_steps: int, every: int) -> None:
        """`every`: steps between plain lines."""
        self.console = Console(file=sys.stderr, quiet=not is_speaking, soft_wrap=True)
        self._is_live = is_speaking and self.console.is_terminal
        self._total = total_steps
        self._every = every
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def start(self, *, done: int) -> None:
        if not self._is_live:
            return
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._progress.start()
        self._task = self._progress.add_task("training", total=self._total, completed=done, figures="")

    def advance(self, step: int, figures: str, *, step_s: float) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, figures=figures)
        elif step == 1 or step % self._every == 0 or step == self._total:
            self.line(f"step {step}/{self._total}  {figures}  {format_seconds(step_s)}/step")

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
