"""Progress of tokenising a corpus: a progress bar on a terminal, occasional lines elsewhere.

Nothing is printed for short work. Everything goes to stderr. The rank that tokenises reports; of the ranks that wait
for it, only rank 0.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from weft.core.units import format_bytes, format_seconds

QUIET_S = 2.0
LINE_EVERY_S = 30.0


class TokenisingDisplay:
    """Progress of one build, or of a wait for another process's build."""

    def __init__(self, *, is_speaking: bool, is_main: bool) -> None:
        self._console = Console(file=sys.stderr, quiet=not is_speaking, soft_wrap=True)
        self._is_live = is_speaking and self._console.is_terminal
        self._is_main = is_main
        self._began_s = self._last_s = time.monotonic()
        self._total: int | None = None
        self._done = 0
        self._bar: tuple[Progress, TaskID] | None = None
        self._has_spoken = False

    def start(self, total_bytes: int | None) -> None:
        self._total, self._done = total_bytes, 0
        self._began_s = self._last_s = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now_s = time.monotonic()
        if now_s - self._began_s < QUIET_S:
            return
        if self._is_live:
            self._draw()
        elif not self._has_spoken or now_s - self._last_s >= LINE_EVERY_S:
            self._line(f"tokenising: {self._amount()}, {format_seconds(now_s - self._began_s)}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None
        if self._has_spoken:
            self._line(f"tokenised {format_bytes(self._done)} in {format_seconds(time.monotonic() - self._began_s)}")
            self._has_spoken = False

    def wait_for(self, owner: str) -> None:
        now_s = time.monotonic()
        if self._is_main and not self._has_spoken and now_s - self._began_s >= QUIET_S:
            self._line(f"waiting for {owner}, which tokenises the data")

    def _amount(self) -> str:
        total = "" if self._total is None else f" of {format_bytes(self._total)}"
        return f"{format_bytes(self._done)}{total}"

    def _draw(self) -> None:
        if self._bar is None:
            columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            progress = Progress(*columns, console=self._console)
            progress.start()
            self._bar = progress, progress.add_task("tokenising", total=self._total)
            self._has_spoken = True
        progress, task = self._bar
        progress.update(task, completed=self._done)

    def _line(self, text: str) -> None:
        self._has_spoken, self._last_s = True, time.monotonic()
        self._console.print(text, highlight=False, markup=False)
