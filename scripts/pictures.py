"""Draws the pictures of the README: the report of a run, and a verdict of `weft verify`, through headless Chromium.

    python scripts/pictures.py RUN_FOLDER --chromium /usr/bin/chromium

RUN_FOLDER is a finished run. The verdict is that of a ZeRO-3 plan on two CPU ranks. Pictures go to docs/pictures.
"""

from __future__ import annotations

import argparse
import html
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
REPORT_SIZE = (1280, 1180)
VERDICT_SIZE = (1280, 900)
VERIFY = ["verify", "--nproc", "2", "--set", "data_parallel.zero=3"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--chromium", default="chromium")
    chosen = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    photograph(chosen.run / "report.html", "report.png", REPORT_SIZE, chromium=chosen.chromium)
    done = subprocess.run([sys.executable, "-m", "weft", *VERIFY], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("PASS", "FAIL", "  "))]
    verdict = "\n".join([f"$ weft {' '.join(VERIFY)}", *lines])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "verify.html"
        page.write_text(terminal(verdict), encoding="utf-8")
        photograph(page, "verify.png", VERDICT_SIZE, chromium=chosen.chromium)


def terminal(text: str) -> str:
    """The text as a terminal window; what is longer than a line is cut."""
    page = (
        "<body style='margin:0;background:#12151c;color:#d7dce6;font:15px/1.62 monospace;padding:26px 30px'>"
        "<div style='white-space:pre;overflow:hidden;text-overflow:ellipsis'>{}</div></body>"
    )
    shown = html.escape(text).replace("  ok  ", "  <b style='color:#6fce8a'>ok</b>  ")
    return page.format(shown.replace("PASS", "<b style='color:#6fce8a'>PASS</b>"))


def photograph(page: Path, name: str, size: tuple[int, int], *, chromium: str) -> None:
    """A page as a PNG of `size`."""
    width, height = size
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=8000"]
    shot = [f"--screenshot={PICTURES / name}", f"--window-size={width},{height}"]
    subprocess.run([chromium, *flags, *shot, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
