"""Rows a second of weft's servers against the same table behind gRPC and behind Ray calls across two raylets.

    python benchmarks/server_wire.py [--rows 4000000] [--rounds 7] [--without-ray]

Every peer has the same table (64 columns, row-wise Adagrad, the same kernels) in a process of its own and gets the same
keys; peers take turns round by round, figures are medians. `weft server bench` has the figures against raw TCP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from server_behind import Behind

from weft.server import bench
from weft.server.wire.sockets import Endpoint

SERVICE = "/weft.Bench/"
GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def serve_grpc(pipe: Connection, rows: int) -> None:
    import grpc

    behind = Behind(rows)

    def pull(request: bytes, _: Any) -> bytes:
        return behind.pull(np.frombuffer(request, np.int64)).tobytes()

    def push(request: bytes, _: Any) -> bytes:
        count = int(np.frombuffer(request, np.int64, 1)[0])
        keys = np.frombuffer(request, np.int64, count, 8)
        values = np.frombuffer(request, np.float32, count * bench.DIM, 8 + 8 * count)
        behind.push(keys, values.reshape(count, bench.DIM))
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            kind = details.method.removeprefix(SERVICE)
            return grpc.unary_unary_rpc_method_handler({"pull": pull, "push": push}[kind])

    server = grpc.server(ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(("127.0.0.1", port))
    threading.Event().wait()


def call_grpc(pipe: Connection, endpoint: Endpoint, rows: int) -> None:
    import grpc

    channel = grpc.insecure_channel(str(endpoint), options=GRPC_OPTIONS)
    pull, push = (channel.unary_unary(SERVICE + kind) for kind in ("pull", "push"))

    def call(kind: str, keys: np.ndarray, values: np.ndarray) -> None:
        if kind == "pull":
            np.frombuffer(pull(keys.tobytes()), np.float32).reshape(-1, bench.DIM)
        else:
            push(b"".join([np.int64(keys.size).tobytes(), keys.tobytes(), values.tobytes()]))

    bench.answer_calls(pipe, call, rows, 6)


def call_ray(pipe: Connection, rows: int) -> None:
    """Two raylets on this machine: the actor is on the one that this process is not on."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1, resources={"there": 1})
    paths = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])
    }  # where Ray's workers find the class
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": paths})
    actor = ray.remote(resources={"there": 1}, num_cpus=0)(Behind).remote(rows)

    def call(kind: str, keys: np.ndarray, values: np.ndarray) -> None:
        ray.get(actor.pull.remote(keys) if kind == "pull" else actor.push.remote(keys, values))

    call("pull", np.arange(4), np.empty((0, 0)))
    bench.answer_calls(pipe, call, rows, 7)
    ray.shutdown()
    cluster.shutdown()


@contextmanager
def peers(rows: int, *, with_ray: bool) -> Iterator[dict[str, Connection]]:
    with ExitStack() as stack:
        weft = stack.enter_context(bench.serving(bench.serve, rows, None))
        grpc = stack.enter_context(bench.serving(serve_grpc, rows))
        found = {
            "weft": stack.enter_context(bench.working(bench.calls_of, weft, rows, 1)),
            "gRPC": stack.enter_context(bench.working(call_grpc, grpc, rows)),
        }
        if with_ray:
            found["Ray, two raylets"] = stack.enter_context(bench.working(call_ray, rows))
        yield found


def measure(workers: dict[str, Connection], kind: bench.Kind, size: int, rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    calls = max(4, 200_000 // size)
    for number in range(rounds + 1):
        for name, worker in workers.items():
            found = bench.together([worker], kind, size, calls) / calls
            if number:
                seconds[name].append(found)
    return {name: size / statistics.median(times) for name, times in seconds.items()}


def main(tell: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    start, figures = time.perf_counter(), []
    with peers(given.rows, with_ray=not given.without_ray) as workers:
        tell("| call | keys | " + " | ".join(f"{name}, M rows/s" for name in workers) + " | weft over the others |")
        tell("| --- " * (len(workers) + 3) + "|")
        for size in bench.SIZES:
            for kind in ("pull", "push"):
                speed = measure(workers, kind, size, given.rounds)  # type: ignore[arg-type]
                ratios = [f"{speed['weft'] / speed[name]:.1f} x {name}" for name in speed if name != "weft"]
                cells = [f"{rate / 1e6:.2f}" for rate in speed.values()]
                tell(f"| {kind} | {size:,} | " + " | ".join(cells) + f" | {', '.join(ratios)} |")
                figures.append({"call": kind, "keys": size, **speed})
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
