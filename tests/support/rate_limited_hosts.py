"""Network namespaces as hosts, joined by a bridge whose links carry a given rate each way. Needs root and iproute2.

    with rate_limited_hosts(8, mbit=40) as names: ...     one namespace a host, 10.98.0.1 upwards on eth0

A token bucket shapes what a host sends at its own end and what it receives at the bridge's; segmentation offload is
off, since a bucket drops segments larger than itself.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESS = "10.98.0.{}"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def rate_limited_hosts(number: int, *, mbit: float) -> Iterator[list[str]]:
    stem = f"wc{os.getpid() % 100_000}"
    names = [f"{stem}n{index}" for index in range(number)]
    bridge = f"{stem}b"
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for index, name in enumerate(names):
            _add_host(name, bridge, f"{stem}v{index}", ADDRESS.format(index + 1), mbit)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            run("ip", "link", "del", bridge)


def _add_host(name: str, bridge: str, port: str, address: str, mbit: float) -> None:
    shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "32kb", "limit", "400kb")
    run("ip", "netns", "add", name)
    run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", port, "master", bridge, "up")
    run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        run("ip", "-n", name, "link", "set", device, "up")
    run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
    run("tc", "qdisc", "add", "dev", port, *shape)
    for prefix, device in ((("ip", "netns", "exec", name), "eth0"), ((), port)):
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            run(*prefix, "ethtool", "-K", device, "tso", "off", "gso", "off", "gro", "off")


def ranks_on(names: list[str], command: list[str], *, timeout_s: float) -> list[str]:
    """The standard output of `command` as one rank on each host, under torchrun's variables."""
    master = {"MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": "29517", "WORLD_SIZE": str(len(names))}
    processes = []
    try:
        for rank, name in enumerate(names):
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            environment = {**os.environ, **master, **own, "OMP_NUM_THREADS": "1"}
            inside = ["ip", "netns", "exec", name, *command]
            processes.append(subprocess.Popen(inside, stdout=subprocess.PIPE, env=environment, text=True))
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        if failed:
            raise AssertionError(f"ranks {failed} failed")
        return outputs
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
