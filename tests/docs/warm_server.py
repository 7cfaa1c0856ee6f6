"""Runs commands given as JSON lists on stdin, each in a fork of this process: importing torch a dozen times is slow.

["weft", ...] is what the `weft` command does; ["python", FILE] runs a script. Ranks, dry runs and servers that a
command starts are forks too. Answers {"code", "output"} on stdout.
"""

import gc
import json
import os
import runpy
import sys
import tempfile
import threading
import traceback
from importlib import import_module
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from warm_processes import fork_modules

from weft.cli.main import main
from weft.core.quiet import quiet_libraries

# torch._dynamo: DTensor imports it on first use.
WARM = (
    "torch._dynamo",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "weft.train.worker",
    "weft.verify.session",
    "weft.dryrun.run",
    "weft.server.job.driver",
)


def run(words: list[str], output: TextIO) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        fork_modules()
        sys.argv = words if words[0] == "weft" else words[1:]
        if words[0] == "weft":
            main()
        else:
            runpy.run_path(words[1], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    quiet_libraries()
    for name in WARM:
        import_module(name)
    gc.freeze()  # all of torch: forks neither look through it nor copy it
    if threading.active_count() > 1:
        raise RuntimeError("a fork would lose the threads that imports have started")
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            code = run(json.loads(line), output)
            output.seek(0)
            print(json.dumps({"code": code, "output": output.read()}), flush=True)


if __name__ == "__main__":  # processes that a command spawns import this file again
    serve()
