"""Draws the pictures of the README: the report of a run, and a verdict of `weft verify`, through headless Chromium.

    python scripts/pictures.py RUN_FOLDER --chromium /usr/bin/chromium

RUN_FOLDER is a finished run. The verdict is that of a ZeRO-3 plan on two CPU ranks. Pictures go to docs/pictures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
REPORT_SIZE = (1280, 1180)
VERIFY = ["verify", "--nproc", "2", "--set", "data_parallel.zero=3"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--chromium", default="chromium")
    chosen = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    photograph(chosen.run / "report.html", "report.png", REPORT_SIZE, chromium=chosen.chromium)
    done = subprocess.run([sys.executable, "-m", "weft", *VERIFY], capture_output=True, text=True, check=True)
    verdict = f"$ weft {' '.join(VERIFY)}\n{done.stdout}"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "verify.svg"
        page.write_text(terminal(verdict), encoding="utf-8")
        photograph(page, "verify.png", REPORT_SIZE, chromium=chosen.chromium)


def terminal(text: str) -> str:
    """The text as a terminal window."""
    console = Console(record=True, width=116, force_terminal=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text(text))
    return console.export_svg(title="weft verify")


def photograph(page: Path, name: str, size: tuple[int, int], *, chromium: str) -> None:
    """A page as a PNG of `size`."""
    width, height = size
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=8000"]
    shot = [f"--screenshot={PICTURES / name}", f"--window-size={width},{height}"]
    subprocess.run([chromium, *flags, *shot, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
