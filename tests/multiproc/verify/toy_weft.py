"""weft with a further axis, which only replicates: `toy_weft.py VERB …` is weft, `toy_weft.py verified …` is a rank."""

from __future__ import annotations

import sys

from weft.core import axes

axes.register("toy")


def verified(run: str, plan: str, answer: str) -> None:
    """One rank of a verification; rank 0 writes its verdict."""
    import json
    import os
    from pathlib import Path

    import weft

    verdict = weft.verify(weft.RunSpec.from_file(run), weft.Plan.from_file(plan), steps=3)
    if os.environ["RANK"] == "0":
        Path(answer).write_text(json.dumps(verdict.as_dict()), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "verified":
        verified(*sys.argv[2:])
    else:
        from weft.cli.main import main

        main()
