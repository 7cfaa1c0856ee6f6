"""Speed of this machine's devices: matrix product, copies, a small all-reduce. JSON on stdout.

    python -m weft.comm.device_speed [--ranks N]

Figures are the best of several repetitions: what a device can do, so that one that cannot stands out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GPU_SIZE, _CPU_SIZE = 8192, 1024
_GPU_BYTES, _CPU_BYTES = 256 << 20, 32 << 20
_REPEATS = 8
_TIMEOUT_S = 120


def devices() -> list[torch.device]:
    """All GPUs, or the CPU as one device."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]


def measure_device(device: torch.device) -> dict[str, Any]:
    """Operations per second of a product (bfloat16 on a GPU), bytes per second of a copy (read and written)."""
    on_gpu = device.type == "cuda"
    size, dtype = (_GPU_SIZE, torch.bfloat16) if on_gpu else (_CPU_SIZE, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_s = best_time(lambda: torch.mm(a, b), device)
    num_bytes = _GPU_BYTES if on_gpu else _CPU_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = best_time(lambda: target.copy_(source), device)
    return {
        "label": f"GPU {device.index}" if on_gpu else "CPU",
        "name": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "matmul_flops": 2 * size**3 / product_s,
        "copy_bytes_per_s": 2 * num_bytes / copy_s,
    }


def measure_pairs(found: list[torch.device]) -> list[dict[str, Any]]:
    """Copies from each device to each other one; `direct`: whether they have peer access."""
    pairs = []
    for source in found:
        for target in found:
            if source == target:
                continue
            data = torch.ones(_GPU_BYTES, dtype=torch.uint8, device=source)
            place = torch.empty(_GPU_BYTES, dtype=torch.uint8, device=target)
            seconds = best_time(lambda place=place, data=data: place.copy_(data), source, target)  # type: ignore[misc]
            pairs.append(
                {
                    "label": f"GPU {source.index} to GPU {target.index}",
                    "bytes_per_s": _GPU_BYTES / seconds,
                    "direct": torch.cuda.can_device_access_peer(source, target),
                }
            )
    return pairs


def best_time(work: Callable[[], object], *used: torch.device) -> float:
    """Seconds of the fastest repetition; the first two are warm-up."""

    def wait() -> None:
        for device in used:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    times = []
    for _ in range(_REPEATS + 2):
        wait()
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return min(times[2:])


def measure_all_reduce(num_ranks: int) -> dict[str, Any] | None:
    """An all-reduce over `num_ranks` processes of this machine, by the bus bandwidth of nccl-tests."""
    if num_ranks < 2:
        return None
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        arguments = ["--ranks", str(num_ranks), "--store", str(Path(folder) / "store")]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "weft.comm.device_speed", *arguments, "--rank", str(rank)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            said = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    found: dict[str, Any] = json.loads(said[0].strip().splitlines()[-1])
    return found


def all_reduce_of(rank: int, num_ranks: int, store: Path) -> dict[str, Any]:
    """One rank's part of the all-reduce; the figures are those of the slowest rank."""
    on_gpu = torch.cuda.device_count() >= num_ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=store.absolute().as_uri(),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    num_bytes = _GPU_BYTES if on_gpu else _CPU_BYTES // 4
    tensor = torch.ones(num_bytes // 4, device=device)
    seconds = torch.tensor([best_time(lambda: dist.all_reduce(tensor), device)], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    algorithm = num_bytes / seconds.item()
    return {"ranks": num_ranks, "bytes": num_bytes, "bus_bytes_per_s": algorithm * 2 * (num_ranks - 1) / num_ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", type=Path)
    asked = parser.parse_args()
    if asked.rank is not None:
        print(json.dumps(all_reduce_of(asked.rank, asked.ranks, asked.store)))
        return
    found = devices()
    on_gpu = found[0].type == "cuda"
    answer = {
        "devices": [measure_device(device) for device in found],
        "pairs": measure_pairs(found) if on_gpu and len(found) > 1 else [],
        "all_reduce": measure_all_reduce(asked.ranks or (len(found) if on_gpu else 2)),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
