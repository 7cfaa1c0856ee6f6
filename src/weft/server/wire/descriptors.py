"""File descriptors of this process: as many as the system allows, some of them kept for the log and snapshots.

descriptors are numbered from below: a connection numbered limit - reserve or higher has left only the reserve
"""

from __future__ import annotations

import contextlib
import sys

_WANTED = 65_536  # more serves nobody, and some systems allow a billion
_RESERVE = 64


def raise_limit() -> None:
    """The soft limit of open files up to the hard one. For processes of our own, not for a library's caller."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the limit of before will do
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_in_reserve(descriptor: int) -> bool:
    """Whether a connection with this number leaves too few for files: a quarter of a small limit, else 64."""
    if sys.platform == "win32":
        return False
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(_RESERVE, limit // 4)
