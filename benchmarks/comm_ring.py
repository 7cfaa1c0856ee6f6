"""The ring of `weft comm`, from sends and receives, beside Gloo's own all-reduce, on this machine.

    python benchmarks/comm_ring.py [--ranks 2,4] [--mib 64] [--repeats 25]

The two take turns within every repeat, so that other jobs slow down both alike; a time is that of the slowest rank
after a barrier. Printed: medians, the median of the ratios within a repeat (Gloo's time / the ring's: 1 is equal speed,
above 1 the ring is faster), and the load of the machine before and after. The process ends with 1 below 0.8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

BOUND = 0.8


def rank_main(mib: int, repeats: int) -> None:
    import torch
    import torch.distributed as dist

    from weft.comm.algorithms.registry import ALGORITHMS
    from weft.comm.wire import Wire

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wire = Wire(dist.new_group(), dist.new_group(), device_type="cpu")
    ring = ALGORITHMS["all_reduce"]["ring"]
    values = torch.randn(mib * 2**18, generator=torch.Generator().manual_seed(dist.get_rank()))
    summed = {"gloo": values.clone(), "ring": values.clone()}
    ways = {"gloo": lambda x: dist.all_reduce(x), "ring": lambda x: wire.all_reduce(x, ring)}
    seconds: dict[str, list[float]] = {"gloo": [], "ring": []}
    for repeat in range(repeats + 1):
        for name in sorted(ways, reverse=bool(repeat % 2)):
            summed[name].copy_(values)
            dist.barrier()
            began_s = time.perf_counter()
            ways[name](summed[name])
            slowest = torch.tensor(time.perf_counter() - began_s)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if repeat:
                seconds[name].append(float(slowest))
    torch.testing.assert_close(summed["ring"], summed["gloo"])
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


def measure(ranks: int, mib: int, repeats: int) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--rank", "--mib", str(mib), "--repeats", str(repeats)],
        check=True, stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--rank", action="store_true")
    asked = parser.parse_args()
    if asked.rank:
        rank_main(asked.mib, asked.repeats)
        return
    ratios = []
    for ranks in map(int, asked.ranks.split(",")):
        before = os.getloadavg()[0]
        found = measure(ranks, asked.mib, asked.repeats)
        ratio = statistics.median(own / ring for own, ring in zip(found["gloo"], found["ring"], strict=True))
        ratios.append(ratio)
        gloo_s, ring_s = (statistics.median(found[name]) for name in ("gloo", "ring"))
        print(
            f"{ranks} ranks, {asked.mib} MiB: gloo {gloo_s:.4f} s, ring {ring_s:.4f} s, speed of the ring {ratio:.2f} "
            f"of gloo's (load {before:.1f} to {os.getloadavg()[0]:.1f}, {asked.repeats} repeats)",
            flush=True,
        )
    sys.exit(min(ratios) < BOUND)


if __name__ == "__main__":
    main()
