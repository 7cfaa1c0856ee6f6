"""Puts the tests' own modules on the path: `from gloo_ranks import run_ranks`, `from tiny import FAMILIES`."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "multiproc"))
sys.path.insert(0, str(Path(__file__).parent / "support"))

# Shapes that one test process derives are read by the next, and by commands that tests start.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "xdg")

# The same examples every time, so that a change is judged by what it changed; WEFT_TEST_RANDOM=1 looks for new ones.
# No deadline: a busy machine is no error.
settings.register_profile("weft", deadline=None, derandomize=not os.environ.get("WEFT_TEST_RANDOM"))
settings.load_profile("weft")

# Engines and graphs make many objects that live as long as the test: the collector's default looks at them too often
# (5% of the processor time of the suite).
gc.set_threshold(50_000, 20, 100)

# A shell ignores interrupts for what it starts in the background, and children inherit that: tests that send one
# to themselves or to a launcher would wait for ever when the suite itself runs in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _garbage_of_this_file_only() -> None:
    """Keep what is alive when a file begins (torch, tests collected) out of collections: half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_group_left_behind() -> Iterator[None]:
    """An engine makes a one-rank process group where there is none; the next test must not find it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
