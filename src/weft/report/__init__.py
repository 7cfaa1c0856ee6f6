"""Records in, one self-contained page out: `write_report(run_dir)` draws a run folder as report.html.

It reads files only: no torch, no devices, no network, and nothing of the run is changed.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_report"]


def write_report(run_dir: Path) -> Path:
    """Draw the run folder as one self-contained page; returns the path of report.html."""
    # Imported here: plotly costs a quarter of a second that no rank should pay before its first step.
    from weft.report.page import write_page

    return write_page(run_dir)
