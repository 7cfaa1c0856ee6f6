"""`TensorBoard`: scalars of steps, in a folder that a resumed run goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Values that are not there are left out."""
        if self._writer is None:  # after the first step: importing TensorBoard takes a second
            from torch.utils.tensorboard import SummaryWriter

            # What a run that was cut short had written beyond its last checkpoint is taken back.
            self._writer = SummaryWriter(str(self._path), purge_step=step if step > 1 else None)
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
