"""`RowSession`: the rows of one forward and backward. It reads them once, and afterwards has their gradients.

It knows neither servers nor models: `read` gives rows for keys, and `ShardedEmbedding` asks the session that is
current in its thread. The order: prefetch (optional) -> forward (lookups) -> backward -> take_gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import TableError

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]
Read = Callable[[Mapping[str, Keys]], Mapping[str, Rows]]

_current = threading.local()  # workers may be threads of one process


@dataclass(frozen=True)
class _Lookup:
    """Rows that a forward uses: sorted unique keys, and the leaf that collects their gradient."""

    keys: Keys
    leaf: Tensor


class RowSession:
    """Use as a context manager around the forward."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lookups: dict[str, list[_Lookup]] = {}
        self._previous: RowSession | None = None

    def prefetch(self, wanted: Mapping[str, Keys]) -> None:
        """Reads the rows of several tables in one round trip; lookups that these cover read no more."""
        self._fetch({table: np.unique(keys) for table, keys in wanted.items()})

    def lookup(self, table: str, keys: Keys) -> tuple[Tensor, Tensor]:
        """A matrix of rows, and the row number of each key in it."""
        for lookup in self._lookups.get(table, ()):
            places = np.minimum(np.searchsorted(lookup.keys, keys), max(0, len(lookup.keys) - 1))
            if len(lookup.keys) and np.array_equal(lookup.keys[places], keys):
                return lookup.leaf, torch.from_numpy(places)
        unique, places = np.unique(keys, return_inverse=True)
        self._fetch({table: unique})
        return self._lookups[table][-1].leaf, torch.from_numpy(places.reshape(-1))

    def take_rows(self, table: str) -> Rows:
        """The rows of a prefetch, for a table that no lookup will ask for: dense parameters, say."""
        return self._lookups.pop(table)[-1].leaf.detach().numpy()

    def take_gradients(self) -> dict[str, tuple[Keys, Rows]]:
        """Unique keys and the sums of their gradients, table by table; the session is empty afterwards."""
        found = {table: _gradient_of(lookups) for table, lookups in self._lookups.items()}
        self._lookups = {}
        return {table: pair for table, pair in found.items() if len(pair[0])}

    def _fetch(self, wanted: Mapping[str, Keys]) -> None:
        is_training = torch.is_grad_enabled()
        for table, rows in self._read(wanted).items():
            leaf = torch.from_numpy(rows).requires_grad_(is_training)
            self._lookups.setdefault(table, []).append(_Lookup(wanted[table], leaf))

    def __enter__(self) -> RowSession:
        self._previous = getattr(_current, "session", None)
        _current.session = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _current.session = self._previous


def current_session() -> RowSession:
    session: RowSession | None = getattr(_current, "session", None)
    if session is None:
        raise TableError(
            "a ShardedEmbedding was called outside a session, so it has no servers to read from",
            hint="train it with weft.server.Trainer, or call it inside `with RowSession(read):`",
        )
    return session


def _gradient_of(lookups: list[_Lookup]) -> tuple[Keys, Rows]:
    used = [lookup for lookup in lookups if lookup.leaf.grad is not None]
    if not used:
        return np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32)
    gradients = [_as_rows(lookup.leaf) for lookup in used]
    if len(used) == 1:
        return used[0].keys, gradients[0]
    keys, places = np.unique(np.concatenate([lookup.keys for lookup in used]), return_inverse=True)
    total = torch.zeros(len(keys), gradients[0].shape[1])
    total.index_add_(0, torch.from_numpy(places.reshape(-1)), torch.from_numpy(np.concatenate(gradients)))
    return keys, total.numpy()


def _as_rows(leaf: Tensor) -> Rows:
    if leaf.grad is None:
        raise RuntimeError("a leaf without a gradient")
    rows: Rows = leaf.grad.numpy()
    return rows
