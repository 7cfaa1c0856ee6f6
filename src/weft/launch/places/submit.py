"""Hands a text over to the program of a place (`sbatch`, `kubectl`), and returns the name that it gives the job."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from weft.core.errors import PlaceError

_PATIENCE_S = 120.0
_WITHOUT = "without --submit the file is printed, to be submitted elsewhere"


def hand_over(command: Sequence[str], text: str, *, folder: Path | None = None) -> str:
    """Run the program with `text` on its stdin; return what it prints. PlaceError if it is missing or refuses."""
    if shutil.which(command[0]) is None:
        raise PlaceError(f"there is no {command[0]} on this machine", hint=f"run this where it is, or {_WITHOUT}")
    try:
        done = subprocess.run(
            list(command), input=text, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, cwd=folder
        )
    except subprocess.TimeoutExpired:
        raise PlaceError(
            f"{command[0]} has not answered in {_PATIENCE_S:.0f} s", hint=f"is its server up? {_WITHOUT}"
        ) from None
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.strip().splitlines() if line.strip()]
        why = said[0] if said else f"exit code {done.returncode}"
        raise PlaceError(f"{command[0]} refused the job: {why}", hint="; ".join(said[1:3]) or _WITHOUT)
    return done.stdout.strip()


def submit_slurm(script: str) -> str:
    """The number of the job."""
    return hand_over(["sbatch", "--parsable"], script).partition(";")[0]


def submit_kubernetes(manifests: str) -> str:
    """The names of the objects, as `kubectl` prints them."""
    return " ".join(hand_over(["kubectl", "apply", "--output=name", "--filename=-"], manifests).split())
