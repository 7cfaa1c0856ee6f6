"""The table and its lock, as every peer of server_wire.py has them; in a file of its own, where Ray can import it."""

from __future__ import annotations

import threading

import numpy as np

from weft.server import bench


class Behind:
    """The table and its lock, as every peer has them."""

    def __init__(self, rows: int) -> None:
        self.table = bench.filled_table(rows)
        self.lock = threading.Lock()

    def pull(self, keys: np.ndarray) -> np.ndarray:
        found = np.empty((keys.size, bench.DIM), np.float32)
        with self.lock:
            self.table.pull(keys, found)
        return found

    def push(self, keys: np.ndarray, values: np.ndarray) -> None:
        with self.lock:
            self.table.push(np.array(keys), values)
