"""`ShardedEmbedding`: nn.Embedding and nn.EmbeddingBag with rows on parameter servers; `RowSession`: rows of one step.

The module holds no rows and no optimizer: a forward reads the rows of its unique keys through the current session of
its thread. The session knows neither servers nor models. Keys are any int64, so there is no size; a key that was never
trained reads its initial value. The order: prefetch (optional) -> forward (lookups) -> backward -> take_gradients.

    mode None:  rows[..., dim] for keys[...]            as nn.Embedding
    mode "sum" | "mean" | "max":  one row for each bag  as nn.EmbeddingBag (offsets, per_sample_weights)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import TableError
from weft.core.table_spec import Eviction, RowInit, RowOptimizer, TableSpec
from weft.server.arrays import Keys, Rows

Read = Callable[[Mapping[str, Keys]], Mapping[str, Rows]]

_current = threading.local()  # workers may be threads of one process
Mode = Literal["sum", "mean", "max"]


@dataclass(frozen=True)
class _Lookup:
    """Rows of a forward: sorted unique keys, and the leaf that collects their gradient."""

    keys: Keys
    leaf: Tensor


class RowSession:
    """Use as a context manager around the forward."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lookups: dict[str, list[_Lookup]] = {}
        self._previous: RowSession | None = None

    def prefetch(self, wanted: Mapping[str, Keys]) -> None:
        """Reads rows of several tables in one round trip; lookups of these keys read nothing."""
        self._fetch({table: np.unique(keys) for table, keys in wanted.items()})

    def lookup(self, table: str, keys: Keys) -> tuple[Tensor, Tensor]:
        """A matrix of rows, and the row number of each key."""
        for lookup in self._lookups.get(table, ()):
            places = np.minimum(np.searchsorted(lookup.keys, keys), max(0, len(lookup.keys) - 1))
            if len(lookup.keys) and np.array_equal(lookup.keys[places], keys):
                return lookup.leaf, torch.from_numpy(places)
        unique, places = np.unique(keys, return_inverse=True)
        self._fetch({table: unique})
        return self._lookups[table][-1].leaf, torch.from_numpy(places.reshape(-1))

    def take_rows(self, table: str) -> Rows:
        """The prefetched rows of a table without lookups, such as dense parameters."""
        return self._lookups.pop(table)[-1].leaf.detach().numpy()

    def take_gradients(self) -> dict[str, tuple[Keys, Rows]]:
        """Unique keys and the sums of their gradients, by table; empties the session."""
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

    def __exit__(self, *error: object) -> None:
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
    used = [(lookup.keys, lookup.leaf.grad) for lookup in lookups if lookup.leaf.grad is not None]
    if not used:
        return np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32)
    if len(used) == 1:
        return used[0][0], used[0][1].numpy()
    keys, places = np.unique(np.concatenate([keys for keys, _ in used]), return_inverse=True)
    total = torch.zeros(len(keys), used[0][1].shape[1])
    total.index_add_(0, torch.from_numpy(places.reshape(-1)), torch.cat([gradient for _, gradient in used]))
    return keys, total.numpy()


class ShardedEmbedding(nn.Module):
    """Several modules of a model may share a table; they must describe it alike."""

    def __init__(
        self,
        table: str,
        dim: int,
        *,
        mode: Mode | None = None,
        optimizer: RowOptimizer | None = None,
        init: RowInit | None = None,
        admit_after: int = 1,
        eviction: Eviction | None = None,
        tier: Literal["memory", "mapped"] = "memory",
    ) -> None:
        super().__init__()
        self.mode = mode
        self.spec = TableSpec(
            name=table,
            dim=dim,
            optimizer=optimizer or RowOptimizer(),
            init=init or RowInit(),
            admit_after=admit_after,
            eviction=eviction or Eviction(),
            tier=tier,
        )

    def forward(self, keys: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        flat = keys.detach().reshape(-1).long().numpy()
        rows, places = current_session().lookup(self.spec.name, flat)
        index = places.reshape(keys.shape)
        if self.mode is None:
            return F.embedding(index, rows)
        return F.embedding_bag(index, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights)

    def extra_repr(self) -> str:
        return f"{self.spec.name!r}, {self.spec.dim}, mode={self.mode!r}"


def table_specs(model: nn.Module) -> list[TableSpec]:
    """The tables that a model's embeddings need, each once."""
    found: dict[str, TableSpec] = {}
    for module in model.modules():
        if not isinstance(module, ShardedEmbedding):
            continue
        spec = module.spec
        if found.setdefault(spec.name, spec) != spec:
            raise TableError(
                f"two embeddings describe the table {spec.name!r} differently",
                hint="same dim, optimizer and init, or another name",
            )
    return list(found.values())
