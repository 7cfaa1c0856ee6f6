"""An update with states in files against the disk's own speed, and the host memory it takes as the model grows.

    python benchmarks/offload_files.py --out benchmarks/results/offload_files-DATE-cpu.md

The disk's own speed: four threads that read a file and write another past the page cache (O_DIRECT, 8 MiB at a time),
as many bytes as an update reads and writes, measured in turn with the updates. An update is what a step adds for states
in files: reading, checksums, AdamW on the host, checksums, writing. Each size of model has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import nn

from weft.core import offload_sizes
from weft.core.plan import Plan
from weft.core.state_folder import StateFolder
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy

WIDTH = 2048
BLOCK_BYTES = 8 << 20
THREADS = 4
Record = dict[str, Any]


class Wide(nn.Module):
    """Matrices and nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def main() -> int:
    given = _arguments()
    if given.of_size is not None:
        print(json.dumps(measured(given.of_size, given)))
        return 0
    records = []
    for size in given.sizes:
        command = [sys.executable, __file__, "--of-size", str(size), "--rounds", str(given.rounds)]
        command += ["--folder", str(given.folder), "--chunk", str(given.chunk), "--update", given.update]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        records.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(records[-1]), flush=True)
    text = page(records, given)
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    return 0


def measured(millions: int, given: argparse.Namespace) -> Record:
    """One model: medians over the rounds, and memory."""
    offload_sizes.CHUNK_ELEMENTS = given.chunk
    folder = given.folder / f"of-{millions}"
    shutil.rmtree(folder, ignore_errors=True)
    plan = Plan.from_tables({"offload": {"optimizer": "nvme", "update": given.update}})
    bare_bytes = _status("VmRSS")
    states = StateFolder(path=folder)
    model = Wide(max(1, round(millions * 1e6 / WIDTH**2)))
    engine = Engine(model, plan, optimizer=OptimizerPolicy(), blocks=["blocks"], state_folder=states, device="cpu")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    update(engine)  # the first one converts the allocated space of the file
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins again
    moved_bytes = 2 * 8 * num_parameters  # two moments, read and written
    updates, raws = [], []
    raw = RawDisk(folder, 8 * num_parameters)
    for _ in range(given.rounds):
        raws.append(raw.seconds())
        began_s = time.perf_counter()
        update(engine)
        updates.append(time.perf_counter() - began_s)
    peak_bytes = _status("VmHWM")
    assert engine.offload is not None
    cached_bytes = _cached(next(folder.glob("rank-*.states")))
    record = {
        "parameters": num_parameters,
        "states_bytes": 8 * num_parameters,
        "update_s": statistics.median(updates),
        "disk_s": statistics.median(raws),
        "update_gb_s": moved_bytes / statistics.median(updates) / 1e9,
        "disk_gb_s": moved_bytes / statistics.median(raws) / 1e9,
        "share": statistics.median(one / other for one, other in zip(raws, updates, strict=True)),
        "besides_bytes": peak_bytes - bare_bytes - 8 * num_parameters,
        "slots_bytes": engine.offload.host_bytes,
        "cached_bytes": cached_bytes,
    }
    engine.close()
    shutil.rmtree(folder, ignore_errors=True)
    return record


def update(engine: Engine) -> None:
    assert engine.offload is not None
    engine.offload.begin_update()
    engine.offload.step()
    engine.offload.begin_update()  # until all is written


class RawDisk:
    """Reads of a file and writes of another at the same time."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._nbytes = nbytes // BLOCK_BYTES * BLOCK_BYTES
        self._files = []
        for name in ("from", "to"):
            file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            os.posix_fallocate(file, 0, self._nbytes)
            self._files.append(file)
        self._memory = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(THREADS)]
        self._move(writes=self._files, reads=[])  # as the files of states: no space that was never written

    def seconds(self) -> float:
        began_s = time.perf_counter()
        self._move(writes=self._files[1:], reads=self._files[:1])
        return time.perf_counter() - began_s

    def _move(self, *, writes: list[int], reads: list[int]) -> None:
        blocks = [(at, file) for at in range(0, self._nbytes, BLOCK_BYTES) for file in (*reads, *writes)]

        def run(number: int) -> None:
            memory = self._memory[number]
            for at, file in blocks[number::THREADS]:
                done = os.preadv(file, [memory], at) if file in reads else os.pwritev(file, [memory], at)
                if done != BLOCK_BYTES:
                    raise OSError("a short transfer")

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(run, range(THREADS)))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _cached(path: Path) -> int:
    """Bytes of a file in the page cache."""
    command = ["fincore", "-b", "-n", "-o", "RES", str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def page(records: list[Record], given: argparse.Namespace) -> str:
    mib, first = 2**20, records[0]
    rows = [
        f"| {one['parameters'] / 1e6:.0f} M | {one['states_bytes'] / mib:.0f} | {one['update_s']:.2f} |"
        f" {one['update_gb_s']:.2f} | {one['disk_gb_s']:.2f} | {one['share']:.2f} | {one['slots_bytes'] / mib:.0f} |"
        f" {one['besides_bytes'] / mib:.0f} | {one['cached_bytes'] / mib:.0f} |"
        for one in records
    ]
    last = records[-1]
    grown, more = last["parameters"] / first["parameters"], last["besides_bytes"] - first["besides_bytes"]
    lines = [
        f"# An update with states in files, {time.strftime('%Y-%m-%d')}", "",
        f"{len(os.sched_getaffinity(0))} cores (shared with other jobs), torch {torch.__version__}, ext4 on a virtual"
        f" disk. AdamW, float32, updated on the {given.update}, chunks of {given.chunk} elements,"
        f" {offload_sizes.SLOTS} in flight. Medians of {given.rounds} rounds; the disk and the update in turn.", "",
        "    python benchmarks/offload_files.py", "",
        "| model | states, MiB | update, s | update, GB/s | disk alone, GB/s | share | slots, MiB | peak memory besides"
        " weights and gradients, MiB | of the file in the page cache, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |", *rows, "",
        "GB/s: bytes read and written. share: time of the disk alone / time of the update, median of the rounds.",
        f"The model grew {grown:.1f} times; the memory besides weights and gradients by {more / mib:.0f} MiB.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=lambda text: [int(one) for one in text.split(",")], default=[60, 120, 180])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=1 << 22, help="elements of a chunk")
    parser.add_argument("--update", choices=("host", "device"), default="host")
    parser.add_argument("--folder", type=Path, default=Path("offload-files"), help="scratch, on a local disk")
    parser.add_argument("--of-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
