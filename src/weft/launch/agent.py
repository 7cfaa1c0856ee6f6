"""The agent of torch elastic with our rendezvous, environment variables and supervision of ranks.

The entry is `local.launch`; `cause` finds the cause of a failure; `host_ranks` has the ranks of one of several hosts.
One generation of ranks:

    new store on loopback -> ranks start -> all end with 0, or one fails -> short grace -> the rest is killed -> verdict
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from weft.core.errors import RankError, WeftError
from weft.core.processes import state_of
from weft.launch.cause import RankEnd, find_cause, has_named, is_certain, judge
from weft.launch.memory_files import MemoryFiles
from weft.launch.rank_processes import RankProcess, Streams, Variables, WarmRanks, start_cold
from weft.launch.rank_variables import elastic_variables, rank_variables
from weft.launch.stop_signals import StopCount
from weft.train.ranks.environment import SCRATCH_VARIABLE
from weft.train.ranks.failures import is_debugging, read_record
from weft.train.ranks.last_stack import read_stack, stack_path
from weft.train.ranks.store import serve_store

_LOOPBACK = "127.0.0.1"
STORE_TIMEOUT_S = 300.0
_POLL_S = 0.1
# Time for the other ranks to end by themselves after a failure: enough to record their own error, and more while the
# only known error is a lost peer, since the record of the cause may still follow.
_CERTAIN_GRACE_S = 1.0
_UNCERTAIN_GRACE_S = 5.0
_NAMED_GRACE_S = 2.0
# After the first request to stop: a stopped rank that does not wake in this time is killed, and so are the others,
# which wait for it.
_WAKE_S = 5.0


class Generations(RendezvousHandler):
    """A rendezvous of one host: every generation of ranks gets a store of its own.

    Torch's own handler keeps the first store over restarts, so that restarted ranks read dead ranks' addresses.
    """

    def __init__(self) -> None:
        self.count = 0
        self._refusal: WeftError | None = None

    def refuse(self, error: WeftError) -> None:
        """No further generation: the next one that elastic asks for raises this."""
        self._refusal = error

    def next_rendezvous(self) -> RendezvousInfo:
        if self._refusal is not None:
            raise self._refusal
        self.count += 1
        store = serve_store(_LOOPBACK, timeout_s=STORE_TIMEOUT_S)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, store.port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "weft-local"

    def get_run_id(self) -> str:
        return "weft"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class RankSurroundings:
    """Sets the variables of each rank and creates a folder per generation; ranks share the launcher's output."""

    def __init__(
        self, *, scratch: Path, num_ranks: int, interface: str | None = "lo", memory: MemoryFiles | None = None
    ) -> None:
        self._scratch = scratch
        self._memory = memory
        self._num_ranks = num_ranks
        self._interface = interface
        self.folder = scratch

    def streams(self, variables: Variables) -> Streams | None:
        """Files for a rank's stdout and stderr; None: those of the launcher."""
        return None

    def common(self) -> dict[str, str]:
        """The variables that all ranks have, in every generation."""
        return rank_variables(
            scratch=self._scratch,
            num_ranks=self._num_ranks,
            given=os.environ,
            platform=sys.platform,
            interface=self._interface,
        )

    def begin(self, envs: dict[int, dict[str, str]]) -> None:
        """An empty folder for this generation; completes the variables of its ranks."""
        self.folder = self._scratch / f"generation-{envs[0]['TORCHELASTIC_RESTART_COUNT']}"
        shutil.rmtree(self.folder, ignore_errors=True)  # it may hold errors of an earlier launch
        self.folder.mkdir(mode=0o700, parents=True)
        for rank, variables in envs.items():
            memory = self._memory.variables(rank) if self._memory is not None else {}
            variables.update(self.common() | {SCRATCH_VARIABLE: str(self.folder)} | memory)


class RankAgent(SimpleElasticAgent):
    """Elastic's agent, with processes of our own and other rules for a rank that fails or a user who asks to stop."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        generations: Generations,
        surroundings: RankSurroundings,
        stops: StopCount,
        log: Callable[[str], None],
        warm: WarmRanks | None = None,
    ) -> None:
        super().__init__(spec)
        self._spec = spec
        self._generations = generations
        self._surroundings = surroundings
        self._stops = stops
        self._log = log
        self._warm = warm
        self._processes: dict[int, RankProcess] = {}
        self._num_stops_obeyed = 0
        self._asked_at = 0.0
        self._killed_pids: set[int] = set()
        self.error: WeftError | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        restarts = self._spec.max_restarts - self._remaining_restarts
        envs = {
            worker.local_rank: elastic_variables(worker, worker_group, restart_count=restarts)
            for worker in worker_group.workers
        }
        self._surroundings.begin(envs)
        self._processes = {rank: self._start(variables) for rank, variables in envs.items()}
        return {rank: process.pid for rank, process in self._processes.items()}

    def _start(self, variables: Variables) -> RankProcess:
        streams = self._surroundings.streams(variables)
        if self._warm is not None:
            self._await_imports(self._warm)
            process = self._warm.start(self._spec.args[1:], variables, streams=streams)
            if process is not None:
                return process
            if self._spec.max_restarts:
                self._log(f"note: each restart imports all libraries again: {self._warm.unfit}")
            self._warm = None
        return start_cold((str(self._spec.entrypoint), *self._spec.args), variables, streams=streams)

    def _await_imports(self, warm: WarmRanks) -> None:
        warm.wait_until_ready(lambda: self._stops.count > 0)
        if self._stops.count:
            raise RankError("stopped before the ranks were ready; nothing was saved")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End what still runs: nothing, unless starting failed half-way."""
        self._kill([end for end in self._look() if end.is_running])

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Elastic calls this every `monitor_interval`."""
        self._obey_stops()
        ends = self._look()
        if self._is_over(ends):
            self._conclude(self._end_generation())
            return RunResult(state=WorkerState.FAILED)
        if any(end.is_running for end in ends):
            return RunResult(state=WorkerState.HEALTHY)
        returned = {worker.global_rank: None for worker in worker_group.workers}  # elastic wants a value of each
        return RunResult(state=WorkerState.SUCCEEDED, return_values=returned)

    def _is_over(self, ends: list[RankEnd]) -> bool:
        """Whether the generation has failed, although some ranks may still run."""
        return any(end.has_failed or end.killed_by_launcher for end in ends)

    def _look(self) -> list[RankEnd]:
        rank_of = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return [
            RankEnd(
                rank=rank_of[local_rank],
                pid=process.pid,
                exit_code=process.poll(),
                killed_by_launcher=process.pid in self._killed_pids,
                record=read_record(self._surroundings.folder, rank=rank_of[local_rank]),
                stack=tuple(read_stack(str(stack_path(self._surroundings.folder, rank=rank_of[local_rank])))),
            )
            for local_rank, process in self._processes.items()
        ]

    def _obey_stops(self) -> None:
        asked = self._stops.count
        if asked == 0:
            return
        running = [end for end in self._look() if end.is_running]
        if asked > self._num_stops_obeyed:
            self._num_stops_obeyed, self._asked_at = asked, time.monotonic()
            if asked > 1:
                self._kill(running)
                return
            for end in running:
                _send(end.pid, signal.SIGTERM)
        self._wake(running)

    def _wake(self, running: list[RankEnd]) -> None:
        """Continue stopped ranks (SIGSTOP, a debugger): they can neither save nor end, and the others wait for them."""
        stopped = [end for end in running if state_of(end.pid) in ("T", "t")]
        for end in stopped:
            _send(end.pid, signal.SIGCONT)
        if stopped and time.monotonic() - self._asked_at > _WAKE_S:
            self._kill(running)

    def _end_generation(self) -> list[RankEnd]:
        """Waits briefly for the records of the other ranks, then kills those that still run; returns all ends."""
        started = time.monotonic()
        ends = self._look()
        while any(end.is_running for end in ends):
            if time.monotonic() - started >= self._grace_s(ends):
                self._kill([end for end in ends if end.is_running])
                break
            time.sleep(_POLL_S / 2)
            ends = self._look()
        for process in self._processes.values():
            process.wait()
        return self._look()

    def _grace_s(self, ends: list[RankEnd]) -> float:
        cause = find_cause(ends)
        if cause is not None and cause.is_killed and not self._stops.count:
            return 0.0  # no record of a peer would change the cause, and a checkpoint in flight is safe at any moment
        if cause is not None and has_named(cause):  # a hung rank does not end by itself
            return _NAMED_GRACE_S
        return _CERTAIN_GRACE_S if is_certain(cause) else _UNCERTAIN_GRACE_S

    def _kill(self, ends: list[RankEnd]) -> None:
        for end in ends:
            self._killed_pids.add(end.pid)
            # Elastic starts each rank as the leader of a session: its own child processes go with it.
            _send(end.pid, signal.SIGKILL, whole_group=True)

    def _conclude(self, ends: list[RankEnd]) -> None:
        self.error = judge(ends, num_stops=self._stops.count)
        if is_debugging():
            for end in ends:
                self._log(end.record.traceback if end.record else f"rank {end.rank}: exit code {end.exit_code}")
        if self._stops.count or self.error.exit_code == 2:
            self._generations.refuse(self.error)
        elif self._generations.count <= self._spec.max_restarts:
            attempt = f"{self._generations.count} of {self._spec.max_restarts}"
            self._log(f"{self.error.message}; restarting all ranks ({attempt})")


def _send(pid: int, number: signal.Signals, *, whole_group: bool = False) -> None:
    try:
        if whole_group and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:  # it has ended meanwhile
        pass
