"""The tests' Gloo ranks, for benchmarks: `run_ranks`, what it raises, and what its fork server imports beforehand.

Importing it also puts the tests' support modules (`metered_ranks`, say) on the path, in ranks as in the script.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1] / "tests"
for _folder in ("multiproc", "support"):
    sys.path.insert(0, str(_TESTS / _folder))

from gloo_ranks import _CONTEXT, _OURS, _PRELOADED, RankFailureError, run_ranks  # noqa: E402

__all__ = ["RankFailureError", "preload", "run_ranks"]


def preload(*modules: str) -> None:
    """Imported once, by the server that ranks are forked from; to be said before the first rank."""
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *_OURS, *modules])
