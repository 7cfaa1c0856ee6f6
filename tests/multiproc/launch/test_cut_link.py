"""Two hosts as network namespaces, and the link between them cut: both sides end, and each names the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

RANK_SCRIPT = Path(__file__).with_name("rank_script.py")
TIMEOUT_S = 8
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
    ),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, 10.97.0.1 and 10.97.0.2 on their `eth0`."""
    names = [f"weft{os.getpid()}a", f"weft{os.getpid()}b"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for place, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.97.0.{place + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_rank(host: str, rank: int, folder: Path) -> subprocess.Popen[str]:
    """As srun would: no agent, rank 0 serves the store. Each host has a name of its own."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.97.0.1",
        "MASTER_PORT": "29777",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "RANK_TIMEOUT_S": str(TIMEOUT_S),
    }
    named = f"hostname host{rank}; exec {sys.executable} {RANK_SCRIPT} forever {folder}"
    return subprocess.Popen(
        ["ip", "netns", "exec", host, "unshare", "--uts", "bash", "-c", named],
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_both_sides_of_a_cut_link_end_and_name_the_other(hosts: list[str], tmp_path: Path) -> None:
    ranks = [start_rank(host, rank, tmp_path) for rank, host in enumerate(hosts)]
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2)  # some beats
        ip("-n", hosts[0], "link", "set", "eth0", "down")
        said = [rank.communicate(timeout=TIMEOUT_S + 60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [3, 3]
    assert "error [W704]: rank 1 (host host1, pid" in said[0]
    assert "did not arrive in all_reduce" in said[0]
    assert "error [W704]: rank 0 (host host0, pid" in said[1]
    assert "has not answered for" in said[1]
