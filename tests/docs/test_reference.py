"""The committed reference pages are what the code says now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from blocks import ROOT


def test_reference_pages_are_up_to_date(tmp_path: Path) -> None:
    # A fixed width: the help text must not depend on the terminal the tests run in.
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    script = ROOT / "scripts" / "reference.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=60, env=environment)
    fresh = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").iterdir()}
    notice = "written by scripts/reference.py"  # a benchmark writes the table of families
    committed = {name: text for name, text in pages.items() if notice in text}
    assert committed.keys() == fresh.keys()
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"{stale} differ: run `python scripts/reference.py`"
