"""The agent of one node of a cluster's job: `python -m weft.launch.node [options] -- train run.toml ...`.

It is torchrun but for its end: rendezvous and restarts are torch elastic's, ranks report their own errors.

    SIGTERM, SIGUSR1    -> SIGTERM to the ranks, which save and end, however long that takes; exit code `--stopped-code`
    a rank has failed   -> the exit code of the first one: 2 is bad input, which no cluster should start again

Options have torchrun's variables as defaults (PET_NNODES, ...), which Kubeflow's operator sets; Slurm numbers nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from weft.core.processes import parent_of

FAILED, BAD_INPUT = 3, 2
_UNUSED_SIGNAL = "SIGURG"


def main() -> None:
    options = _parser().parse_args()
    stops = Stops()
    stops.take_over()
    if options.with_parent:
        threading.Thread(target=_end_with_stdin, name="parent", daemon=True).start()
    code = run_node(options)
    sys.exit(options.stopped_code if stops.came and code == 0 else code)


def run_node(options: argparse.Namespace) -> int:
    """Run the ranks of this node to their end; return the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if os.environ.get("WEFT_DEBUG", "0") in ("", "0"):
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # pages without the cause
    # Elastic's own handlers kill ranks 30 s after a signal, saved or not; it takes no empty list of signals. Newer
    # versions of torchrun overwrite the variable.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _UNUSED_SIGNAL
    knows_option = "--signals-to-handle" in torchrun.get_args_parser().format_help()
    signals = ["--signals-to-handle", _UNUSED_SIGNAL] if knows_option else []
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun would read them again
    try:
        torchrun.main([*signals, *torchrun_arguments(options)])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else FAILED
    return 0


def torchrun_arguments(options: argparse.Namespace) -> list[str]:
    # Static: the agent of rank 0 serves the store. With c10d's rendezvous the agents compare the address with those of
    # their host's name, and where names do not resolve none of them serves it.
    endpoint = f"{options.address}:{options.port}"
    meet = ["--rdzv-backend", "static", "--rdzv-endpoint", endpoint, "--node-rank", str(options.node_rank)]
    sizes = ["--nnodes", str(options.nodes), "--nproc-per-node", str(options.ranks)]
    restarts = ["--rdzv-id", options.id, "--max-restarts", str(options.max_restarts)]
    return [*sizes, *meet, *restarts, "-m", "weft", *options.words]


class Stops:
    """Forwards a request to stop to the ranks of this node."""

    def __init__(self) -> None:
        self.came = False

    def take_over(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        ranks = own_ranks()
        if not ranks:  # before they start there is nothing to save
            raise SystemExit(128 + signal.SIGTERM)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGTERM)


def _end_with_stdin() -> None:
    """A parent that has died, in whatever way, leaves the end of this process's stdin."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def own_ranks() -> list[int]:
    """Processes that this one has started as leaders of a session: elastic starts ranks so, and nothing else."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if parent_of(pid) == os.getpid() and _leads(pid)]


def _leads(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _parser() -> argparse.ArgumentParser:
    given = os.environ
    parser = argparse.ArgumentParser(prog="python -m weft.launch.node", description="Start the ranks of one node.")
    parser.add_argument("--nodes", type=int, default=given.get("PET_NNODES", "1"))
    parser.add_argument("--ranks", type=int, default=given.get("PET_NPROC_PER_NODE", "1"), help="ranks of this node")
    node_rank = given.get("PET_NODE_RANK", given.get("SLURM_NODEID", "0"))
    parser.add_argument("--node-rank", type=int, default=node_rank)
    parser.add_argument("--address", default=given.get("PET_MASTER_ADDR", "127.0.0.1"), help="of the first node")
    parser.add_argument("--port", type=int, default=given.get("PET_MASTER_PORT", "29500"))
    parser.add_argument("--id", default="weft", help="name of this start of the job, the same on all nodes")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--stopped-code", type=int, default=0, help="exit code after a stop that was asked for")
    parser.add_argument("--with-parent", action="store_true", help="end when stdin ends")
    parser.add_argument("words", nargs="+", help="the verb of weft and its arguments")
    return parser


if __name__ == "__main__":
    main()
