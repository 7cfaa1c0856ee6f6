"""A rank without torch for the tests of warm ranks: `python -m warm_script MODE FOLDER`, found through PYTHONPATH.

It notes what it was given; in generation 0 rank 1 then ends as MODE says.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"rank {rank} began", flush=True)
    facts = {
        "is_warm": "decimal" in sys.modules,
        "argv": sys.argv[1:],
        "world": os.environ["WORLD_SIZE"],
        "is_leader": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "pid": os.getpid(),
        "scratch": os.environ["WEFT_SCRATCH"],
    }
    draft = folder / f"draft-{rank}"
    draft.write_text(json.dumps(facts))
    draft.rename(folder / f"facts-{generation}-{rank}")
    if mode == "forever":
        time.sleep(300)
    if generation == "0" and rank == "1":
        while not (folder / "facts-0-0").exists():  # its peer is killed with it, and must have begun
            time.sleep(0.01)
        if mode == "exit":
            sys.exit(7)
        if mode == "parent":
            os.kill(os.getppid(), signal.SIGKILL)
        if mode in ("kill", "parent"):
            os.kill(os.getpid(), signal.SIGKILL)
    elif generation == "0" and mode in ("kill", "parent"):
        time.sleep(300)  # a peer that would never end by itself


main()
