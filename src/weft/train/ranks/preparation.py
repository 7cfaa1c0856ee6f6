"""Work of unbounded duration that ranks do before the process group exists (tokenising, for example).

Finished ranks wait at the store, not in a collective, whose timeout would end the job. A working rank increments
`beats` every few seconds; a missing rank is an error only if `beats` does not change for the timeout.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.core.errors import RankError
from weft.train.ranks.environment import Process

BEAT_S = 2.0
_rounds = itertools.count()  # a process may join, leave and join again with the same torchrun store


def prepare_together(work: Callable[[], object], store: Store, *, process: Process, timeout_s: float) -> None:
    """Run `work` on every rank; return when all ranks have finished."""
    if process.world_size == 1:
        work()
        return
    store = PrefixStore(f"preparation-{next(_rounds)}", store)
    done = threading.Event()
    beating = threading.Thread(target=_beat, args=(store, done), name="preparation", daemon=True)
    beating.start()
    try:
        work()
    finally:
        done.set()
        beating.join()  # a store client must not be shared with a thread that waits on it
    store.set(f"done-{process.rank}", "")
    if store.add("done", 1) == process.world_size:
        store.set("all", "")
    _await_all(store, process=process, timeout_s=timeout_s)


def _beat(store: Store, done: threading.Event) -> None:
    while True:
        store.add("beats", 1)
        if done.wait(BEAT_S):
            return


def _await_all(store: Store, *, process: Process, timeout_s: float) -> None:
    beats, changed_s = -1, time.monotonic()
    while not _is_set(store, "all", patience_s=min(BEAT_S, timeout_s)):
        found = store.add("beats", 0)
        if found != beats:
            beats, changed_s = found, time.monotonic()
        elif time.monotonic() - changed_s > timeout_s:
            missing = [rank for rank in range(process.world_size) if not store.check([f"done-{rank}"])]
            raise RankError(
                f"rank {missing[0]} of {len(missing)} missing ranks did not prepare its data: no heartbeat for"
                f" {timeout_s:.0f} s",
                hint="see that rank's own output; a host may be down, or never have started its ranks",
            )


def _is_set(store: Store, key: str, *, patience_s: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=patience_s))
    except dist.DistStoreError:
        return False
    return True
