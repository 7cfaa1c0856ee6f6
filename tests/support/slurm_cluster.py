"""A Slurm of two nodes on this machine, from its own munged, slurmctld and slurmd; each node is a host of net_hosts.

Node names do not resolve on the nodes, as on many clusters: Slurm knows their addresses. Daemons end with the block.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from net_hosts import NetHosts

IS_POSSIBLE = all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("slurmctld", "slurmd", "munged"))
PATIENCE_S = 40.0


class SlurmCluster:
    """`environment` lets srun, sbatch and scontrol find the cluster."""

    def __init__(self, folder: Path, hosts: NetHosts) -> None:
        self.folder, self.hosts = folder, hosts
        self.nodes = [f"node{number}" for number in range(1, len(hosts.names) + 1)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("state", "munge"):
            (self.folder / name).mkdir(parents=True)
        self._start_munge()
        (self.folder / "slurm.conf").write_text(self._configuration())
        self._run("slurmctld", ["slurmctld", "-D", "-c"])
        for place in range(len(self.nodes)):
            self.start_node(place)
        self.await_idle(len(self.nodes))

    def stop(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["scancel", "-u", "root"], env=self.environment, check=False, timeout=5)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()

    def start_node(self, place: int) -> None:
        node = self.nodes[place]
        # Not `ip netns exec`, whose new /sys has no control groups.
        inside = ["nsenter", f"--net=/run/netns/{self.hosts.namespace(place)}"]
        self._run(node, [*inside, "slurmd", "-D", "-N", node])

    def stop_node(self, place: int) -> None:
        """A power cut: daemon, step daemons and ranks at once, and the link."""
        self.hosts.kill(place)
        self._daemons.pop(self.nodes[place]).wait()

    def await_idle(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.query("sinfo", "-h", "-o", "%D", "-t", "idle").strip()) != str(count):
            assert time.monotonic() < deadline, f"{found} of {count} nodes idle: {self.logs()}"
            time.sleep(0.2)

    def query(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.environment, check=False, capture_output=True, text=True, timeout=30
        ).stdout

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))

    def _run(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _start_munge(self) -> None:
        folder, key = self.folder / "munge", self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (folder, key):
            shutil.chown(path, "munge", "munge")
        folder.chmod(0o755)
        for parent in (self.folder, *self.folder.parents):  # munge's own user must get here
            if parent != Path("/") and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        options = {"key-file": key, "socket": folder / "s", "pid-file": folder / "pid", "log-file": folder / "log"}
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [
            "runuser",
            "-u",
            "munge",
            "--",
            "/usr/sbin/munged",
            "--foreground",
            f"--seed-file={folder}/seed",
            *words,
        ]
        self._run("munged", command)
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "s").exists():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def _configuration(self) -> str:
        folder, base = self.folder, 20000 + os.getpid() % 10000
        lines = [
            "ClusterName=weft",
            f"SlurmctldHost={os.uname().nodename}({self.hosts.gateway})",
            f"SlurmctldPort={base}",
            f"SlurmdPort={base + 1}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/s",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool.%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "JobAcctGatherType=jobacct_gather/none",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "KillWait=5",
            "MpiDefault=none",
        ]
        lines += [
            f"NodeName={node} NodeHostname={node} NodeAddr={address} CPUs=2 RealMemory=4000"
            for node, address in zip(self.nodes, self.hosts.addresses, strict=True)
        ]
        lines.append(f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES State=UP")
        return "\n".join(lines) + "\n"


@contextlib.contextmanager
def slurm_cluster(folder: Path, hosts: NetHosts) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, hosts)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
