"""Where the states of chunks wait between updates: `HostStore`, host memory; `engine/offload/file_store.py`, files.

begin(chunks)     the chunks of an update, in order
fetch(chunk)      host memory with the chunk's states, valid until `put`
put(chunk, ...)   the memory has the new states, once the given wait returns
end()             all chunks of the update are put; what `put` began may go on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.engine.offload.chunks import StateChunk


class HostStore:
    """States that stay in a slab of host memory: nothing moves."""

    def begin(self, chunks: Sequence[StateChunk]) -> None:
        """See the module."""

    def fetch(self, chunk: StateChunk) -> dict[str, torch.Tensor]:
        return {key: chunk.bank.part(key, flat, chunk.begin, chunk.end) for key, flat in chunk.bank.states.items()}

    def weights_of(self, chunk: StateChunk) -> torch.Tensor | None:
        """Host memory for the chunk's updated weights, to be filled before `put`; None: they are not kept."""
        return None

    def put(self, chunk: StateChunk, stored: Callable[[], None]) -> None:
        """See the module."""

    def end(self) -> None:
        """See the module."""

    def settle(self) -> None:
        """Return when nothing is on its way."""
