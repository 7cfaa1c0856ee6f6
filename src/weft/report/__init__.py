"""Records in, one self-contained page out: `write_report(run_dir)` draws a run folder as report.html.

It reads files only: no torch, no devices, no network, and the run stays unchanged. Trainings and runs on parameter
servers share the page (`page`), its elements (`markup`, `chart`) and the reader (`folder`); their sections differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_report"]

REPORT = "report.html"


def write_report(run_dir: Path, *, beside: Sequence[Path] = ()) -> Path:
    """Draw the run folder as one self-contained page; returns the path of report.html.

    `beside`: further runs on parameter servers, drawn in the same charts.
    """
    # Imported here: no rank needs the page before its first step.
    from weft.report.folder import is_server_run
    from weft.report.page import write_page

    run_dir = Path(run_dir)
    if beside or is_server_run(run_dir):
        from weft.report.server.page import build_server_page

        page = build_server_page(run_dir, beside=[Path(other) for other in beside])
    else:
        from weft.report.training.page import build_training_page

        page = build_training_page(run_dir)
    return write_page(page, run_dir / REPORT, hint="check space and permissions")
