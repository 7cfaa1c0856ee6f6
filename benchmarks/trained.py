"""`weft train` as a user runs it, and what it wrote down of every step."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def metrics_of(name: str, settings: Mapping[str, Any], *options: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; ends the program with the run's own error where there was one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "weft", "train", "--out", f"{folder}/run", *options]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-800:]}")
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
