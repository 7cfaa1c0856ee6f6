"""What is left of a job on two hosts after its launcher, an agent, or a link is lost; and what the launcher says.

    python benchmarks/launch_hosts.py [--attempts 20] [--what launcher,agent,link]

Hosts are network namespaces of this machine, each with its own sshd. Ranks only sleep: their work does not matter here.
Needs root, iproute2 and sshd. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from net_hosts import NetHosts, net_hosts  # noqa: E402

LAUNCHER = ROOT / "tests" / "multiproc" / "launch" / "hosts_script.py"
BOUND_S = 10.0
PATIENCE_S = 120.0
RANK = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], os.environ['RANK']).touch(); time.sleep(600)"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    left_s: float  # until the last process of ours was gone
    said_s: float | None  # until the launcher had ended with its message
    message: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempts", type=int, default=20)
    parser.add_argument("--what", default="launcher,agent,link")
    options = parser.parse_args()
    print("| lost | attempts | none left within 10 s | seconds: median, most | message names the host | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, net_hosts(Path(folder) / "net", 2, is_named_loopback=True) as hosts:
        for what in options.what.split(","):
            found = [attempt(hosts, Path(folder) / f"{what}-{number}", what) for number in range(options.attempts)]
            print(row(what, found), flush=True)


def attempt(hosts: NetHosts, folder: Path, what: str) -> Attempt:
    folder.mkdir()
    (folder / "rank.py").write_text(RANK)
    fields = {
        "hosts": "host1:1,host2:1",
        "directory": str(folder),
        "ssh_options": hosts.ssh_options,
        "program": [str(folder / "rank.py")],
        "command": [str(folder)],
    }
    command = [sys.executable, str(LAUNCHER), json.dumps(fields)]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_for(lambda: all((folder / str(rank)).exists() for rank in (0, 1)), PATIENCE_S)
            started = time.monotonic()
            break_it(hosts, launcher, what)
            wait_for(lambda: not ours(hosts, folder), PATIENCE_S)
            left_s = time.monotonic() - started
            message = launcher.communicate(timeout=PATIENCE_S)[1] if what != "launcher" else ""
            said_s = time.monotonic() - started if what != "launcher" else None
        finally:
            hosts.set_link(1, "up")
            launcher.kill()
    return Attempt(left_s=left_s, said_s=said_s, message=message)


def break_it(hosts: NetHosts, launcher: subprocess.Popen[str], what: str) -> None:
    if what == "launcher":
        launcher.kill()
    elif what == "agent":
        os.kill(hosts.commands(1, "host_agent")[-1], signal.SIGKILL)
    else:
        hosts.set_link(1, "down")


def ours(hosts: NetHosts, folder: Path) -> list[int]:
    return [pid for place in (0, 1) for words in (str(folder), "host_agent") for pid in hosts.commands(place, words)]


def wait_for(condition: Callable[[], bool], patience_s: float) -> None:
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > patience_s:
            raise TimeoutError
        time.sleep(0.05)


def row(what: str, found: list[Attempt]) -> str:
    left = [attempt.left_s for attempt in found]
    said = [attempt.said_s for attempt in found if attempt.said_s is not None]
    named = sum("host2 (rank 1) was lost" in attempt.message for attempt in found)
    within = sum(seconds <= BOUND_S for seconds in left)
    words = f"{named} of {len(found)} | {statistics.median(said):.1f}, {max(said):.1f}" if said else "- | -"
    return f"| {what} | {len(found)} | {within} | {statistics.median(left):.1f}, {max(left):.1f} | {words} |"


if __name__ == "__main__":
    main()
