"""Cost of `weft doctor`: processor time alone, and of judging and comparing the records of many hosts.

    python benchmarks/doctor.py [--hosts 64] [--repeats 7]

Records of hosts are made from the recorded node of the tests, one of them with another MTU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from doctor_hosts import make_host

from weft.doctor.compare import compare
from weft.doctor.examine import checks_of, record_of
from weft.doctor.situation import Situation


def time_command(command: list[str], repeats: int) -> tuple[float, float]:
    """Median processor and wall seconds of a command."""
    processor, wall = [], []
    for _ in range(repeats):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        assert done.returncode in (0, 1), done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - started)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(processor), statistics.median(wall)


def make_records(count: int) -> list[str]:
    """Records as JSON lines, as hosts send them; the one of node-5 has another MTU."""
    with tempfile.TemporaryDirectory() as folder:
        usual = record_of(make_host("h100", Path(folder) / "usual"))
        odd = record_of(make_host("h100", Path(folder) / "odd", {"files": {"sys/class/net/bond0/mtu": "1500"}}))
    lines = []
    for index in range(count):
        record = dict(odd if index == 5 else usual)
        record["network"] = {**record["network"], "name": f"node-{index}"}
        lines.append(json.dumps({**record, "host": f"node-{index}"}))
    return lines


def time_comparison(lines: list[str], repeats: int) -> tuple[float, list[dict[str, Any]]]:
    """Median processor seconds from JSON lines to diagnoses, and what is not ok."""
    seconds, found = [], []
    for _ in range(repeats):
        started = time.process_time()
        records = [json.loads(line) for line in lines]
        checks = compare(records)
        for record in records:
            checks += checks_of(record, Situation(num_ranks=8, is_cluster=True))
        seconds.append(time.process_time() - started)
        found = [check.as_dict() for check in checks if check.state != "ok"]
    return statistics.median(seconds), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f}")
    for command in (["-m", "weft.doctor"], ["-m", "weft", "doctor", "--json"]):
        processor, wall = time_command([sys.executable, *command], asked.repeats)
        print(f"python {' '.join(command)}: {processor:.2f} s of processor time, {wall:.2f} s")
    lines = make_records(asked.hosts)
    size = sum(map(len, lines)) / len(lines)
    seconds, found = time_comparison(lines, asked.repeats)
    print(f"{asked.hosts} records of {size / 1024:.1f} KiB judged and compared: {seconds:.3f} s of processor time")
    print("not ok:", json.dumps(found))


if __name__ == "__main__":
    main()
