"""Kernels come from the cache, and never from one of other sources."""

from __future__ import annotations

from weft.server.table import compiled
from weft.server.table.rows import pull_rows, push_rows


def test_the_cache_is_marked_with_every_source() -> None:
    for kernel in (pull_rows, push_rows):
        assert kernel._cache._cache_file._source_stamp == compiled.MARK  # type: ignore[attr-defined]
        assert kernel.targetoptions["nogil"]  # type: ignore[attr-defined]
    assert len(compiled.MARK) == 64
