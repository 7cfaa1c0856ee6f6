"""A launched rank of `weft generate --nproc`: `python -m weft.generate job.json`."""

from __future__ import annotations

import sys
from pathlib import Path

from weft.core.quiet import quiet_libraries


def main() -> None:
    quiet_libraries()
    from weft.train.ranks.process import report_failures

    with report_failures():
        from weft.generate.ranks import GenerateJob, generate_here

        generate_here(GenerateJob.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
