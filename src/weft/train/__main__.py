"""A launched rank: `python -m weft.train job.json`.

`quiet_libraries` must run before libraries are imported, so heavy imports are inside `main`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from weft.core.quiet import quiet_libraries
from weft.train.job import Job


def main() -> None:
    quiet_libraries()
    from weft.train.ranks.process import report_failures

    with report_failures():
        from weft.train.parts import TrainParts
        from weft.train.worker import run_job

        path = Path(sys.argv[1])
        run_job(Job.from_json(path.read_text(encoding="utf-8")), parts=TrainParts.read(path.with_suffix(".parts")))


if __name__ == "__main__":
    main()
