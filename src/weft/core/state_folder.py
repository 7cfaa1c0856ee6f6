"""`StateFolder`: where a run keeps optimizer states in files, and which of them it may continue from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ANY_STEP = -1  # a step before every other


@dataclass(frozen=True, kw_only=True)
class StateFolder:
    """`path`: used unless the plan has offload.folder, of which the run then uses the subfolder `run`.

    `after_step`: continue from files of a later step, as a resume does (`ANY_STEP`: of any); None: a new run.
    """

    path: Path
    run: str = ""
    after_step: int | None = None
