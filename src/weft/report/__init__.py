"""Records in, one self-contained page out: `write_report(run_dir)` draws a run folder as report.html.

It reads files only: no torch, no devices, no network, and nothing of the run is changed. A run on parameter servers
has a page of its own; the folder tells which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_report"]


def write_report(run_dir: Path, *, beside: Sequence[Path] = ()) -> Path:
    """Draw the run folder as one self-contained page; returns the path of report.html.

    `beside`: further runs on parameter servers, drawn in the same charts.
    """
    # Imported here: plotly costs a quarter of a second that no rank should pay before its first step.
    from weft.report.folder import is_server_run

    if beside or is_server_run(Path(run_dir)):
        from weft.report.server_page import write_server_page

        return write_server_page(Path(run_dir), beside=[Path(other) for other in beside])
    from weft.report.page import write_page

    return write_page(run_dir)
