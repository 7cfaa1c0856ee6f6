"""Starts ranks on this machine with torch elastic and waits for their end; raises one error.

The rank's side is `weft.train.ranks.process`. The command may be anything.

    all ranks end with 0 -> returns;  otherwise -> raises the first cause, after `max_restarts` restarts
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weft.core.errors import BadValueError, RankError
from weft.launch.memory_files import MemoryFiles
from weft.launch.rank_processes import WarmRanks, warm_ranks
from weft.launch.stop_signals import StopSignals

_MONITOR_S = 0.05
_ELASTIC_LOGGER = "torch.distributed.elastic"


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    scratch: Path,
    max_restarts: int = 0,
    log: Callable[[str], None] | None = None,
    imports: Sequence[str] = (),
    memory_copies: bool = False,
) -> None:
    """Runs `command` as `num_ranks` ranks of one job; raises the one error that explains a failure.

    `scratch` gets one folder per generation with the pid and error files of the ranks. `log` gets lines for the user,
    such as restarts (default: stderr). SIGINT, SIGTERM and SIGHUP send SIGTERM to the ranks and wait for their end; a
    second one kills them. Bad input is never restarted.

    `imports`: for a `python -m` command, modules that a process imports from which ranks are forked (Linux).
    `memory_copies`: each rank gets memory files that live as long as the launcher (Linux).
    """
    if num_ranks < 1:
        raise BadValueError(f"The number of ranks is {num_ranks}, not at least 1.", hint="give --nproc 1 or more")
    with StopSignals() as stops, quiet_elastic():
        try:
            _run(
                command,
                num_ranks=num_ranks,
                scratch=scratch.absolute(),
                max_restarts=max_restarts,
                stops=stops,
                log=log or _print_to_stderr,
                imports=imports,
                memory_copies=memory_copies,
            )
        except OSError as error:
            raise RankError(f"the ranks could not be started: {error}", hint=f"command: {' '.join(command)}") from error


def _run(
    command: Sequence[str],
    *,
    num_ranks: int,
    scratch: Path,
    max_restarts: int,
    stops: StopSignals,
    log: Callable[[str], None],
    imports: Sequence[str],
    memory_copies: bool,
) -> None:
    with (
        _warm_ranks(command, imports, scratch=scratch, num_ranks=num_ranks) as warm,  # imports while this process does
        _memory_files(num_ranks=num_ranks if memory_copies else 0) as memory,
    ):
        # Here, not at the top: `weft --help` must not wait for torch.
        from torch.distributed.elastic.agent.server.api import WorkerSpec

        from weft.launch.agent import Generations, RankAgent, RankSurroundings

        generations = Generations()
        spec = WorkerSpec(
            role="weft",
            local_world_size=num_ranks,
            rdzv_handler=generations,
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=max_restarts,
            monitor_interval=_MONITOR_S,
        )
        surroundings = RankSurroundings(scratch=scratch, num_ranks=num_ranks, memory=memory)
        agent = RankAgent(spec, generations=generations, surroundings=surroundings, stops=stops, log=log, warm=warm)
        result = agent.run()
    if result.is_failed():
        raise agent.error or RankError("the ranks failed, and none recorded an error")


@contextmanager
def _warm_ranks(
    command: Sequence[str], imports: Sequence[str], *, scratch: Path, num_ranks: int
) -> Iterator[WarmRanks | None]:
    is_module = tuple(command[:2]) == (sys.executable, "-m")
    warm = warm_ranks(imports if is_module else (), scratch=scratch, num_ranks=num_ranks)
    try:
        yield warm
    finally:
        if warm is not None:
            warm.close()


@contextmanager
def _memory_files(*, num_ranks: int) -> Iterator[MemoryFiles | None]:
    if not num_ranks or sys.platform != "linux":
        yield None
        return
    memory = MemoryFiles(num_ranks=num_ranks)
    try:
        yield memory
    finally:
        memory.close()


@contextmanager
def quiet_elastic() -> Iterator[None]:
    """Keeps the failure report of elastic off the terminal: dozens of lines without a cause."""
    from weft.train.ranks.failures import is_debugging

    logger = logging.getLogger(_ELASTIC_LOGGER)
    silence, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(silence)
    logger.propagate = is_debugging()
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silence)


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
