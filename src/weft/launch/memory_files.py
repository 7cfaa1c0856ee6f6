"""Memory files of the ranks of this host, owned by its launcher or agent: they outlive ranks and end with it.

Linux's `memfd_create`: no name in a file system, so nothing is left behind however processes end, and no limit of
/dev/shm. Ranks open them by the launcher's entry in /proc; `checkpoint/memory_file.py` knows what is in them.
"""

from __future__ import annotations

import os

from weft.train.ranks.environment import MEMORY_FILES_VARIABLE

FILES_PER_RANK = 4  # two copies of its state, two of another rank's


class MemoryFiles:
    """Empty files; ranks give them their sizes."""

    def __init__(self, *, num_ranks: int) -> None:
        self._files = [
            [os.memfd_create(f"weft-copy-{rank}-{number}") for number in range(FILES_PER_RANK)]
            for rank in range(num_ranks)
        ]

    @property
    def num_ranks(self) -> int:
        return len(self._files)

    def variables(self, local_rank: int) -> dict[str, str]:
        """The environment of a rank."""
        paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files[local_rank]]
        return {MEMORY_FILES_VARIABLE: os.pathsep.join(paths)}

    def close(self) -> None:
        """The memory is free when the ranks have ended too."""
        for files in self._files:
            for file in files:
                os.close(file)
        self._files = []
