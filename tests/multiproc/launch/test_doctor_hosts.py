"""`weft doctor --hosts`: over a stand-in for ssh; and between network namespaces with sshd (slow)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from net_hosts import IS_POSSIBLE, call, net_hosts

FAKE_SSH = Path(__file__).parents[2] / "support" / "fake_ssh.py"
PATIENCE_S = 100


def ask(hosts: str, ssh: str, cwd: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "weft", "doctor", "--hosts", hosts, "--ssh", ssh, *options, "--json"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["checks"]


def states(checks: list[dict[str, Any]]) -> dict[str, str]:
    return {check["name"]: check["state"] for check in checks if "host" not in check}


def test_hosts_over_ssh_are_compared_and_reach_each_other(tmp_path: Path) -> None:
    """One machine under two names is the same machine: that, and the host that is not there, is what is wrong."""
    code, checks = ask("a,b,unknown", f"{sys.executable} {FAKE_SSH}", tmp_path, "--out", str(tmp_path))
    assert code == 1
    found = states(checks)
    assert {name for name, state in found.items() if state == "wrong"} == {"hosts.names", "hosts.reachable"}
    assert {"hosts.torch", "hosts.connections", "hosts.folder", "hosts.clocks between"} <= {
        name for name, state in found.items() if state == "ok"
    }
    (lost,) = [check for check in checks if check["name"] == "hosts.reachable"]
    assert "unknown" in lost["detail"]
    assert {check["host"] for check in checks if "host" in check} == {"a", "b"}
    assert not list(tmp_path.iterdir())  # the marks are removed


@pytest.mark.slow
@pytest.mark.skipif(not IS_POSSIBLE, reason="needs root, iproute2 and sshd")
def test_a_blocked_way_and_names_on_loopback_are_named(tmp_path: Path) -> None:
    with net_hosts(tmp_path / "net", 3, is_named_loopback=True) as hosts:
        ssh = f"ssh {' '.join(hosts.ssh_options)}"
        shared = tmp_path / "shared"
        shared.mkdir()
        code, checks = ask(",".join(hosts.names), ssh, tmp_path, "--out", str(shared))
        assert states(checks)["hosts.connections"] == "ok", checks
        names = [check for check in checks if check["name"] == "network.name"]
        assert [check["state"] for check in names] == ["warning"] * 3
        call(*hosts.words_on(1, "ip", "route", "add", "blackhole", f"{hosts.addresses[0]}/32"))
        code, checks = ask(",".join(hosts.names), ssh, tmp_path, "--out", str(shared))
        (found,) = [check for check in checks if check["name"] == "hosts.connections"]
        assert (code, found["state"]) == (1, "wrong")
        assert found["detail"].startswith("2 of 6 ways fail: ")
        assert f"host1 to host2 ({hosts.addresses[1]}): no answer" in found["detail"]
        assert f"host2 to host1 ({hosts.addresses[0]}): " in found["detail"]


@pytest.mark.slow
@pytest.mark.skipif(not IS_POSSIBLE, reason="needs root, iproute2 and sshd")
def test_mtu_and_a_host_that_is_down_are_named(tmp_path: Path) -> None:
    with net_hosts(tmp_path / "net", 3) as hosts:
        ssh = f"ssh {' '.join(hosts.ssh_options)}"
        for place in range(3):
            call(*hosts.words_on(place, "ip", "route", "add", "default", "via", hosts.gateway))
        call(*hosts.words_on(2, "ip", "link", "set", "eth0", "mtu", "1400"))
        _, checks = ask(",".join(hosts.names), ssh, tmp_path)
        (found,) = [check for check in checks if check["name"] == "hosts.mtu"]
        assert (found["state"], found["detail"]) == (
            "wrong",
            "MTU of the default route: 1400 on host3; 1500 on the other 2",
        )
        hosts.set_link(1, "down")
        code, checks = ask(",".join(hosts.names), ssh, tmp_path)
        (lost,) = [check for check in checks if check["name"] == "hosts.reachable"]
        assert code == 1
        assert lost["detail"].startswith("host2 cannot be reached")
        assert states(checks)["hosts.connections"] == "ok"
