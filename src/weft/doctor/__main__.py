"""`python -m weft.doctor`: the checks of this host as JSON, without any package installed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from weft.doctor import bench
from weft.doctor.check import WRONG, worst_first
from weft.doctor.examine import checks_of, is_of_cluster, record_of
from weft.doctor.machine import this_machine
from weft.doctor.situation import Situation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weft.doctor", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the run")
    parser.add_argument("--nproc", type=int, help="ranks on this host")
    parser.add_argument("--record", action="store_true", help="print the facts instead of the checks")
    parser.add_argument("--bench", action="store_true", help="measure devices and an all-reduce too (needs torch)")
    asked = parser.parse_args()
    record = record_of(this_machine(asked.out))
    if asked.bench:
        record["bench"] = bench.measure(asked.nproc)
    if asked.record:
        print(json.dumps(record))
        return 0
    own = checks_of(record, Situation(num_ranks=asked.nproc, is_cluster=is_of_cluster(record)))
    checks = worst_first([*bench.judge([record]), *own])
    print(json.dumps({"checks": [check.as_dict() for check in checks]}, indent=1))
    return 1 if any(check.state == WRONG for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
