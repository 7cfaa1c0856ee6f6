"""`TensorBoard`: scalars and texts per step, in a folder that a resumed run continues."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.core.disk import is_full, no_space


class TensorBoard:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None
        self._is_over = False

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write the values that are not None. A full disk ends TensorBoard's curves, not the run."""
        given = {tag: value for tag, value in values.items() if value is not None}
        self._write(step, lambda writer: [writer.add_scalar(tag, value, step) for tag, value in given.items()])

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._write(step, lambda writer: [writer.add_text(tag, one, step) for tag, one in texts.items()])

    def close(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_over, self._writer = True, None
        reason = no_space(self._path) if is_full(error) else str(error)
        print(f"note: TensorBoard files are not written any more: {reason}", file=sys.stderr)

    def _write(self, step: int, add: Callable[[Any], object]) -> None:
        if self._is_over:
            return
        try:
            if self._writer is None:  # after the first step: importing TensorBoard takes a second
                from torch.utils.tensorboard import SummaryWriter

                # Removes the values that an interrupted run had written after its last checkpoint.
                self._writer = SummaryWriter(str(self._path), purge_step=step if step > 1 else None)
            add(self._writer)
        except OSError as error:
            self._give_up(error)
