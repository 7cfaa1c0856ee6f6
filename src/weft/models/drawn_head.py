"""Weights of a folder that has no scalar head, with a drawn one."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from weft.models.initial import Reader, StoresBuffers, WeightSource


class WithDrawnHead:
    """A source of weights from files that have no scalar head: it is drawn as the model's own code draws linears."""

    def __init__(self, files: WeightSource, drawn: WeightSource, head: str) -> None:
        self._files, self._drawn, self._head = files, drawn, head

    def buffer_names(self) -> list[str]:
        return self._files.buffer_names() if isinstance(self._files, StoresBuffers) else []

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Reader]]:
        yield from self._files.readers([name for name in names if name != self._head])
        if self._head in names:
            yield from self._drawn.readers([self._head])
