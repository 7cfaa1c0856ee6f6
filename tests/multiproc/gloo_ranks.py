"""Run a test's function on several Gloo ranks of this machine, and bring results and errors back.

    run_ranks(function, num_ranks, *args) -> [function(rank, num_ranks, *args) for each rank]

The function is a module-level one and is found again by its file and name, so any import mode of pytest works.
Arguments and results are pickled. Ranks are forked from a server that has imported torch once: a rank starts in a
fraction of a second. They see the environment of that server, not later changes; pass what they need as arguments.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# Not with GPUs: a preloaded module asks for devices, and CUDA refuses to start in a fork of such a process.
_CONTEXT = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")
# torch._dynamo: DTensor imports it on first use, which takes a rank three seconds.
_PRELOADED = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp")
# transformers and the engine: a rank that imports them by itself takes seconds of a core, and there may be eight.
_OURS = ("transformers.models.auto.modeling_auto", "weft.engine.engine", "pytest")
# Every model's code imports torchao and all of transformers' generation: a second of each rank.
_MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "gpt2", "mixtral"))
if _CONTEXT.get_start_method() == "forkserver":
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *_OURS, *_MODELS])


class RankFailureError(AssertionError):
    """The tracebacks of the ranks that failed."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call the function on every rank inside an initialised Gloo group; raise when one fails or time runs out."""
    with RankJob(function, num_ranks, *args, timeout_s=timeout_s) as job:
        return job.results()


class RankJob:
    """Ranks that are running. Leaving the `with` block ends whatever is still alive."""

    def __init__(self, function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-ranks-")
        where = (inspect.getfile(function), function.__qualname__)
        store = str(Path(self._folder.name) / "store")
        self.processes: list[Any] = []
        self._pipes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            settings = (where, rank, num_ranks, store, timeout_s, theirs)
            process = _CONTEXT.Process(target=_rank_main, args=(settings, args), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        self._deadline = time.monotonic() + timeout_s  # from here: the first rank of all waits for the server's imports

    def __enter__(self) -> RankJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def kill(self, *ranks: int) -> None:
        """kill -9 of the given ranks, or of all; returns when they are gone."""
        chosen = [self.processes[rank] for rank in ranks] if ranks else self.processes
        for process in chosen:
            process.kill()
        for process in chosen:
            process.join()

    def results(self) -> list[Any]:
        """What each rank returned; the first failure ends the others, who would only wait for it."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {self._pipes[rank]: rank for rank in range(len(self._pipes)) if rank not in answers}
            ready = mp.connection.wait(list(waiting), timeout=max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise RankFailureError(f"ranks {sorted(waiting.values())} did not finish in time")
            for pipe in ready:
                answers[waiting[pipe]] = _receive(waiting[pipe], pipe)
        return [answers[rank] for rank in range(len(self._pipes))]


def _receive(rank: int, pipe: Any) -> Any:
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        raise RankFailureError(f"rank {rank} died without a word") from None
    if kind == "error":
        raise RankFailureError(f"rank {rank} failed:\n{value}")
    return value


def _rank_main(settings: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    where, rank, num_ranks, store, timeout_s, pipe = settings
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # what was preloaded: collections of a rank neither look through it nor copy it
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        _send(pipe, "ok", _find(*where)(rank, num_ranks, *args))
        dist.barrier()  # a rank that leaves early would reset the connections of the others
        dist.destroy_process_group()
    except BaseException:
        with contextlib.suppress(OSError):
            _send(pipe, "error", traceback.format_exc())
        os._exit(1)  # a group in an unknown state must not keep the process alive


def _send(pipe: Any, kind: str, value: Any) -> None:
    # Plain pickle: `pipe.send` would pass tensors as file descriptors, which end with the rank that sent them.
    pipe.send_bytes(pickle.dumps((kind, value)))


def _find(file: str, qualname: str) -> Callable[..., Any]:
    name = "gloo_ranks_of_" + Path(file).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {file}")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    function: Any = sys.modules[name]
    for part in qualname.split("."):
        function = getattr(function, part)
    return function
