"""A table of a parameter server against torch: lookup, gather, update, memory a row, and 50 million rows.

    python benchmarks/server_table.py            10 million rows: speed, cost of a call, memory a row (4 minutes)
    python benchmarks/server_table.py --big      50 million rows, in memory and in a mapped file (10 GB, 4 minutes)

CPU seconds of this process, one thread; rounds of all candidates in turn, medians. torch has no index here: it is given
row numbers, weft's table is given random 64-bit keys.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch

from weft.core.table_spec import RowOptimizer, TableSpec
from weft.server.table.record import state_width
from weft.server.table.table import Table

NUM_ROWS, DIM = 10_000_000, 64
CALLS = {4_096: 64, 65_536: 6}  # keys of a call: calls of a round
ROUNDS = 9
CHUNK = 65_536
MEMORY_CASES = (("sgd", 64), ("adagrad", 64), ("rowwise_adagrad", 64), ("adagrad", 16), ("sgd", 16))


def spec_of(kind: str, dim: int, *, tier: str = "memory") -> TableSpec:
    return TableSpec(name="bench", dim=dim, tier=tier, optimizer=RowOptimizer(kind=kind))  # type: ignore[arg-type]


def keys_of(rows: np.ndarray) -> np.ndarray:
    """Random-looking 64-bit keys: odd multiples are a permutation, and the table hashes them anyway."""
    return (rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))


def build(table: Table, num_rows: int, gradients: np.ndarray | None = None) -> float:
    """Make rows by pushes; CPU seconds."""
    if gradients is None:
        gradients = np.random.default_rng(0).normal(size=(CHUNK, table.spec.dim)).astype(np.float32)
    begin = time.process_time()
    for start in range(0, num_rows, CHUNK):
        keys = keys_of(np.arange(start, min(start + CHUNK, num_rows)))
        table.push(keys, gradients[: keys.size])
    return time.process_time() - begin


def interleave(candidates: dict[str, Callable[[int], object]], num_calls: int) -> dict[str, float]:
    """Median CPU seconds of a call of each; `candidate(i)` makes call number i."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, call in candidates.items():
            begin = time.process_time()
            for i in range(num_calls):
                call(i)
            seconds[name].append((time.process_time() - begin) / num_calls)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def batches(num_keys: int, num_rows: int, *, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, num_rows, num_keys) for _ in range(CALLS[num_keys])]


def torch_rowwise(weights: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor) -> None:
    sums.index_add_(0, rows, gradients.square().mean(dim=1))
    step = -0.05 / (sums[rows].sqrt_() + 1e-8)
    weights.index_add_(0, rows, gradients * step[:, None])


def candidates_of(
    num_keys: int,
    *,
    table: Table,
    plain: torch.Tensor,
    huge: torch.Tensor,
    sums: torch.Tensor,
    ordered: torch.Tensor,
) -> dict[str, Callable[[int], object]]:
    """Ours and torch's in turn, so that neither finds its rows in the cache of the one before."""
    rows = batches(num_keys, NUM_ROWS, seed=1)
    keys = [keys_of(batch) for batch in rows]
    t_rows, t_keys = [torch.from_numpy(batch) for batch in rows], [torch.from_numpy(batch) for batch in keys]
    out, t_out = np.empty((num_keys, DIM), dtype=np.float32), torch.empty(num_keys, DIM)
    found = torch.empty(num_keys, dtype=torch.int64)
    gradients = np.random.default_rng(2).normal(size=(num_keys, DIM)).astype(np.float32)
    t_gradients = torch.from_numpy(gradients)
    return {
        "weft pull (lookup + gather)": lambda i: table.pull(keys[i], out),
        "torch.index_select, torch's memory": lambda i: torch.index_select(plain, 0, t_rows[i], out=t_out),
        "weft slots (lookup alone)": lambda i: table.slots(keys[i]),
        "torch.searchsorted": lambda i: torch.searchsorted(ordered, t_keys[i], out=found),
        "torch.index_select, huge pages": lambda i: torch.index_select(huge, 0, t_rows[i], out=t_out),
        "weft push (lookup + rowwise_adagrad)": lambda i: table.push(keys[i], gradients),
        "torch rowwise_adagrad, torch's memory": lambda i: torch_rowwise(plain, sums, t_rows[i], t_gradients),
        "torch rowwise_adagrad, huge pages": lambda i: torch_rowwise(huge, sums, t_rows[i], t_gradients),
    }


def speed() -> None:
    table = Table(spec_of("rowwise_adagrad", DIM))
    seconds = build(table, NUM_ROWS)
    print(f"built {NUM_ROWS:,} rows by pushes of {CHUNK:,}: {NUM_ROWS / seconds / 1e6:.2f} M rows/s")
    plain = torch.empty(NUM_ROWS, DIM).uniform_(-0.01, 0.01)
    huge = torch.from_numpy(np.empty((NUM_ROWS, DIM), dtype=np.float32)).uniform_(-0.01, 0.01)  # numpy asks for them
    sums = torch.from_numpy(np.zeros(NUM_ROWS, dtype=np.float32))
    ordered = torch.from_numpy(np.sort(keys_of(np.arange(NUM_ROWS))))
    print(f"huge pages of the process: {huge_bytes() / 1e9:.1f} GB of {rss_bytes() / 1e9:.1f} GB")
    print(f"\n{'M keys a CPU second':44}" + "".join(f"{n:>10,}" for n in CALLS))
    results: dict[str, dict[int, float]] = {}
    for num_keys, calls in CALLS.items():
        candidates = candidates_of(num_keys, table=table, plain=plain, huge=huge, sums=sums, ordered=ordered)
        for name, value in interleave(candidates, calls).items():
            results.setdefault(name, {})[num_keys] = num_keys / value / 1e6
    for name, by_size in results.items():
        print(f"{name:44}" + "".join(f"{value:10.2f}" for value in by_size.values()))
    print_ratios(results)


def print_ratios(results: dict[str, dict[int, float]]) -> None:
    pairs = (
        ("weft pull (lookup + gather)", "torch.index_select, torch's memory", 1.0),
        ("weft pull (lookup + gather)", "torch.index_select, huge pages", 0.0),
        ("weft slots (lookup alone)", "torch.searchsorted", 10.0),
        ("weft push (lookup + rowwise_adagrad)", "torch rowwise_adagrad, huge pages", 1.6),
    )
    print(f"\n{'ratio':66}" + "".join(f"{n:>8,}" for n in CALLS) + "     bar")
    for ours, theirs, bar in pairs:
        ratios = [results[ours][n] / results[theirs][n] for n in CALLS]
        print(
            f"{ours + ' / ' + theirs:66.66}"
            + "".join(f"{r:8.2f}" for r in ratios)
            + (f"{bar:8.1f}" if bar else "       -")
        )


def pull_and_push(table: Table, num_keys: int, num_rows: int) -> dict[str, float]:
    """M rows a CPU second, of random rows among the table's."""
    keys = [keys_of(batch) for batch in batches(num_keys, num_rows, seed=3)]
    gradients = np.random.default_rng(4).normal(size=(num_keys, table.spec.dim)).astype(np.float32)
    out = np.empty_like(gradients)
    pair: dict[str, Callable[[int], object]] = {
        "pull": lambda i: table.pull(keys[i], out),
        "push": lambda i: table.push(keys[i], gradients),
    }
    return {name: num_keys / value / 1e6 for name, value in interleave(pair, CALLS[num_keys]).items()}


def optimizers() -> None:
    num_rows = 2_000_000
    print(f"\n{f'M rows a CPU second, {num_rows:,} rows':44}" + "".join(f"{n:>10,}" for n in CALLS))
    for kind in ("sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl"):
        table = Table(spec_of(kind, DIM))
        build(table, num_rows)
        rates = [pull_and_push(table, num_keys, num_rows)["push"] for num_keys in CALLS]
        print(f"{'push ' + kind:44}" + "".join(f"{rate:10.2f}" for rate in rates))


def overhead() -> None:
    table = Table(spec_of("rowwise_adagrad", DIM))
    keys, rows = keys_of(np.arange(1)), np.zeros((1, DIM), dtype=np.float32)
    table.push(keys, rows)
    calls: dict[str, Callable[[int], object]] = {
        "pull": lambda i: table.pull(keys, rows),
        "push": lambda i: table.push(keys, rows),
    }
    print("\ncall with one key, microseconds: ", end="")
    print(", ".join(f"{name} {value * 1e6:.1f}" for name, value in interleave(calls, 2000).items()))


def memory_of(kind: str, dim: int, num_rows: int) -> dict[str, float]:
    gradients = np.zeros((CHUNK, dim), dtype=np.float32)
    build(Table(spec_of(kind, dim)), 2 * CHUNK, gradients)
    gc.collect()
    before = rss_bytes()
    table = Table(spec_of(kind, dim))
    build(table, num_rows, gradients)
    content = 8 + 4 * dim + 4 * state_width(table.spec)
    return {"rss": (rss_bytes() - before) / num_rows, "nbytes": table.nbytes / num_rows, "content": content}


def memory() -> None:
    print(
        f"\n{'bytes a row':34}{'content':>10}{'counted':>10}{'resident':>10}{'ratio':>8}   (content: key + row + state)"
    )
    for kind, dim in MEMORY_CASES:
        for num_rows in (3_000_000, 4_000_000):
            command = [sys.executable, __file__, "--memory-of", kind, str(dim), str(num_rows)]
            line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seen = json.loads(line)
            name = f"{kind}, dim {dim}, {num_rows:,} rows"
            print(
                f"{name:34}{seen['content']:10.0f}{seen['nbytes']:10.1f}{seen['rss']:10.1f}"
                f"{seen['rss'] / seen['content']:8.3f}"
            )


def big(tier: str, num_rows: int, folder: Path) -> None:
    before = rss_bytes()
    table = Table(spec_of("adagrad", 16, tier=tier), folder=folder)
    wall = time.perf_counter()
    seconds = build(table, num_rows)
    wall = time.perf_counter() - wall
    print(f"\n{tier}: {num_rows:,} rows, dim 16, adagrad: {table.nbytes / 1e9:.2f} GB in use")
    print(f"  resident {(rss_bytes() - before) / 1e9:.2f} GB, of it anonymous {anonymous_bytes() / 1e9:.2f} GB")
    print(f"  build {num_rows / seconds / 1e6:.2f} M rows a CPU second, {num_rows / wall / 1e6:.2f} M a wall second")
    for num_keys in CALLS:
        rates = pull_and_push(table, num_keys, num_rows)
        print(f"  {num_keys:,} keys: " + ", ".join(f"{name} {rate:.2f} M rows/s" for name, rate in rates.items()))


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--big-rows", type=int, default=50_000_000)
    parser.add_argument("--only", choices=["speed", "optimizers", "overhead", "memory"])
    parser.add_argument("--memory-of", nargs=3, metavar=("KIND", "DIM", "ROWS"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        kind, dim, num_rows = options.memory_of
        print(json.dumps(memory_of(kind, int(dim), int(num_rows))))
        return
    versions = f"numba {numba.__version__}, numpy {np.__version__}, torch {torch.__version__}"
    print(f"{platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}")
    if options.big:
        for tier in ("memory", "mapped"):
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                big(tier, options.big_rows, Path(folder))
            gc.collect()
        return
    for name, measure in (("speed", speed), ("optimizers", optimizers), ("overhead", overhead), ("memory", memory)):
        if options.only in (None, name):
            measure()
            gc.collect()


if __name__ == "__main__":
    main()
