"""Hosts on this machine: network namespaces on one bridge, each with a name, an /etc/hosts and an sshd of its own.

Needs root, iproute2 and openssh-server. Names and addresses are private to the process; all is removed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

IS_POSSIBLE = (
    sys.platform == "linux"
    and os.geteuid() == 0
    and all(shutil.which(name) for name in ("ip", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd"))
)
PATIENCE_S = 20.0


def call(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], check=check, capture_output=True, text=True)


class NetHosts:
    """`names[i]` has the address `addresses[i]`; `ssh_options` are the words that let ssh reach them from here."""

    def __init__(self, folder: Path, count: int, *, is_named_loopback: bool = False) -> None:
        self.folder = folder
        self.names = [f"host{number}" for number in range(1, count + 1)]
        net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.gateway = f"{net}.254"
        self.addresses = [f"{net}.{number}" for number in range(1, count + 1)]
        self.ssh_options = ("-F", str(folder / "ssh_config"))
        self._prefix = f"wh{os.getpid()}n"
        self.bridge = f"wh{os.getpid()}b"
        self._is_named_loopback = is_named_loopback
        self._daemons: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "id")
        shutil.copy(self.folder / "id.pub", self.folder / "authorized")
        call("ip", "link", "add", self.bridge, "type", "bridge")
        call("ip", "addr", "add", f"{self.gateway}/24", "dev", self.bridge)
        call("ip", "link", "set", self.bridge, "up")
        for place in range(len(self.names)):
            self._add(place)
        self._write_config()
        for place in range(len(self.names)):
            self.start_sshd(place)
        for name in self.names:
            self._await_ssh(name)

    def stop(self) -> None:
        for place in range(len(self.names)):
            self.kill(place)
            call("ip", "netns", "del", self.namespace(place), check=False)
            shutil.rmtree(Path("/etc/netns") / self.namespace(place), ignore_errors=True)
        call("ip", "link", "del", self.bridge, check=False)

    def namespace(self, place: int) -> str:
        return f"{self._prefix}{place + 1}"

    def outer(self, place: int) -> str:
        """The end of the host's link on the bridge."""
        return f"{self._prefix}v{place + 1}"

    def in_namespace(self, place: int, work: Callable[[], None]) -> None:
        """Call `work` in a thread inside the host's network."""
        failures: list[BaseException] = []

        def inside() -> None:
            try:
                with open(f"/run/netns/{self.namespace(place)}", "rb") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                        raise OSError(ctypes.get_errno(), "setns")
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def words_on(self, place: int, *words: str) -> list[str]:
        """The words of a command that runs on the host, with its name."""
        inner = f'hostname {self.names[place]}; exec "$@"'
        return ["ip", "netns", "exec", self.namespace(place), "unshare", "--uts", "sh", "-c", inner, "sh", *words]

    def start_sshd(self, place: int) -> None:
        command = self.words_on(place, "/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / f"sshd{place}"))
        with (self.folder / f"sshd{place}.log").open("ab") as log:
            self._daemons[place] = subprocess.Popen(command, stderr=log, stdout=log, stdin=subprocess.DEVNULL)

    def pids(self, place: int) -> list[int]:
        found = call("ip", "netns", "pids", self.namespace(place), check=False).stdout.split()
        return [int(pid) for pid in found]

    def commands(self, place: int, words: str) -> list[int]:
        """Processes on the host whose command line has the words."""
        found = []
        for pid in self.pids(place):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words in line:
                    found.append(pid)
        return found

    def kill(self, place: int) -> None:
        """All processes of the host at once, as a power cut would: it has no time to say anything."""
        self.set_link(place, "down")
        for pid in self.pids(place):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon = self._daemons.pop(place, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait()

    def revive(self, place: int) -> None:
        self.set_link(place, "up")
        self.start_sshd(place)
        self._await_ssh(self.names[place])

    def set_link(self, place: int, state: str) -> None:
        call("ip", "-n", self.namespace(place), "link", "set", "eth0", state, check=False)

    def _add(self, place: int) -> None:
        name, namespace, address = self.names[place], self.namespace(place), self.addresses[place]
        known = [f"{address} {name}" for name, address in zip(self.names, self.addresses, strict=True)]
        own = [f"127.0.1.1 {name}"] if self._is_named_loopback else []
        etc = Path("/etc/netns") / namespace
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *own, *known]) + "\n")
        outer = self.outer(place)
        call("ip", "netns", "add", namespace)
        call("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        call("ip", "link", "set", outer, "master", self.bridge, "up")
        call("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        call("ip", "-n", namespace, "link", "set", "eth0", "up")
        call("ip", "-n", namespace, "link", "set", "lo", "up")
        key = self.folder / f"key{place}"
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        settings = {
            "Port": "22",
            "ListenAddress": address,
            "HostKey": key,
            "PidFile": "none",
            "AuthorizedKeysFile": self.folder / "authorized",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "prohibit-password",
        }
        lines = "".join(f"{key} {value}\n" for key, value in settings.items())
        (self.folder / f"sshd{place}").write_text(lines)

    def _write_config(self) -> None:
        lines, keys = [], []
        for place, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            lines += [f"Host {name}", f"  HostName {address}", f"  HostKeyAlias {name}"]
            kind, key = (self.folder / f"key{place}.pub").read_text().split()[:2]
            keys.append(f"{name} {kind} {key}")
        (self.folder / "known").write_text("\n".join(keys) + "\n")
        lines += ["Host *", "  User root", f"  IdentityFile {self.folder}/id"]
        lines += [f"  UserKnownHostsFile {self.folder}/known", "  IdentitiesOnly yes", "  LogLevel ERROR"]
        (self.folder / "ssh_config").write_text("\n".join(lines) + "\n")

    def _await_ssh(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while call("ssh", *self.ssh_options, "-o", "BatchMode=yes", name, "true", check=False).returncode:
            assert time.monotonic() < deadline, f"no ssh to {name}: {(self.folder / 'sshd0.log').read_text()}"
            time.sleep(0.1)


@contextlib.contextmanager
def net_hosts(folder: Path, count: int, *, is_named_loopback: bool = False) -> Iterator[NetHosts]:
    hosts = NetHosts(folder, count, is_named_loopback=is_named_loopback)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
