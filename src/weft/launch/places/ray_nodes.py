"""Runs a `RayJob`: places an actor per node, starts the agents, relays their output, raises the cause of a failure.

a node is lost           -> all agents are ended, and started again elsewhere, up to `max_restarts` times
a rank fails             -> its own error; bad input is never started again
Ctrl-C, SIGTERM          -> the ranks of all nodes save and end
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from weft.core.errors import PlaceError, RankError, WeftError, error_classes, first_line
from weft.core.extras import import_extra
from weft.launch.places.ray_job import RayJob
from weft.launch.stop_signals import StopSignals
from weft.train.ranks.environment import ATTEMPT_VARIABLE, JOB_VARIABLE

_POLL_S = 0.5
_GRACE_S = 15.0  # for the other nodes' own errors, after the first
_CALL_S = 120.0  # the first call waits for the worker of the actor
_ERROR = re.compile(r"^error \[(W\d+)\]: (.*)$")


class NodeActor:
    """The agent of one node, as a child process, whose output it keeps."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weft-ray-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._output: TextIO | None = None

    def endpoint(self, *, is_local: bool) -> tuple[str, int]:
        """The address of this node and a port that is free there."""
        host = "127.0.0.1" if is_local else str(import_extra("ray").util.get_node_ip_address())
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, int(probe.getsockname()[1])

    def start(self, job: RayJob, *, node_rank: int, host: str, port: int, attempt: int) -> None:
        words = [self._placed(word, job) for word in job.words]
        command = [sys.executable, "-m", "weft", *words]
        if job.has_agents:
            command = [*_agent(job, node_rank=node_rank, host=host, port=port), "--", *words]
        variables = {JOB_VARIABLE: f"ray {job.name}", ATTEMPT_VARIABLE: str(attempt), **job.environment}
        if host == "127.0.0.1":
            variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        log = self._folder / "log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=job.folder if Path(job.folder).is_dir() else self._folder,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,  # its end, when this actor dies, ends the agent
                stdout=file,
                stderr=file,
            )
        self._output = log.open(encoding="utf-8", errors="replace")

    def poll(self) -> tuple[int | None, str]:
        """The exit code, None while it runs, and the output since the last call."""
        if self._process is None or self._output is None:
            return None, ""
        code = self._process.poll()  # before the output is read: nothing comes after it
        return code, self._output.read()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _placed(self, word: str, job: RayJob) -> str:
        if word not in job.documents:
            return word
        path = self._folder / f"{list(job.documents).index(word)}-{Path(word).name}"
        path.write_text(job.documents[word], encoding="utf-8")
        return str(path)


def main(job: RayJob) -> None:
    """The script's own: exit codes and messages are those of `weft`."""
    try:
        run_on_ray(job)
    except WeftError as error:
        print(f"error [{error.code}]: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)


def run_on_ray(job: RayJob) -> None:
    """Run the job to its end; raise the one error that explains a failure."""
    from weft.server.launchers.ray import connect

    import_extra("ray")
    try:
        connect(job.address or None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise PlaceError(
            f"there is no Ray cluster at {job.address}: {first_line(error)}", hint="`ray status` on its head"
        ) from None
    with StopSignals() as stops:
        for attempt in range(job.max_restarts + 1):
            try:
                _Attempt(job, attempt, stops).run()
                return
            except LostNodeError as error:
                if attempt == job.max_restarts or stops.count:
                    raise RankError(
                        str(error), hint="launched again, it continues from the newest checkpoint"
                    ) from None
                print(f"{error}; starting again ({attempt + 1} of {job.max_restarts})", file=sys.stderr)


class LostNodeError(Exception):
    """A node of a job on Ray was lost; the last one becomes a RankError."""


class _Attempt:
    def __init__(self, job: RayJob, attempt: int, stops: StopSignals) -> None:
        self._job, self._attempt, self._stops = job, attempt, stops
        self._ray = import_extra("ray")
        self._actors: list[Any] = []
        self._text = [""] * job.nodes

    def run(self) -> None:
        group = self._place()
        try:
            self._actors = [self._actor(group, index) for index in range(self._job.nodes)]
            host, port = self._get(self._actors[0].endpoint.remote(is_local=not self._job.address))
            starts = [
                actor.start.remote(self._job, node_rank=index, host=host, port=port, attempt=self._attempt)
                for index, actor in enumerate(self._actors)
            ]
            self._get(starts)
            self._watch()
        finally:
            for actor in self._actors:
                self._ray.kill(actor)
            import_extra("ray", "ray.util.placement_group").remove_placement_group(group)

    def _place(self) -> Any:
        job = self._job
        bundle = {"CPU": float(job.cpus_per_node), **job.resources}
        bundle |= {"GPU": float(job.gpus_per_node)} if job.gpus_per_node else {}
        group = self._ray.util.placement_group([bundle] * job.nodes, strategy=job.strategy, name=job.name)
        if not group.wait(job.patience_s):
            import_extra("ray", "ray.util.placement_group").remove_placement_group(group)
            there = ", ".join(f"{amount:g} {name}" for name, amount in _shown(self._ray.cluster_resources()))
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            raise PlaceError(
                f"Ray has no room for {job.nodes} nodes of {wanted} ({job.strategy}) within {job.patience_s:g} s",
                hint=f"the cluster has {there}; ray.strategy = 'PACK' puts several on one machine",
            )
        return group

    def _actor(self, group: Any, index: int) -> Any:
        strategies = import_extra("ray", "ray.util.scheduling_strategies")
        place = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": self._job.cpus_per_node, "num_gpus": self._job.gpus_per_node}
        return self._ray.remote(NodeActor).options(scheduling_strategy=place, **options).remote()

    def _watch(self) -> None:
        codes: list[int | None] = [None] * self._job.nodes
        failed_at = None
        while None in codes:
            time.sleep(_POLL_S)
            if self._stops.count:
                self._end_all(codes)
            codes = self._poll(codes)
            if failed_at is None and any(codes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
                break
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is not None and not self._stops.count:
            raise self._cause(codes, failed)

    def _poll(self, codes: list[int | None]) -> list[int | None]:
        running = [index for index, code in enumerate(codes) if code is None]
        answers = self._get([self._actors[index].poll.remote() for index in running])
        found = list(codes)
        for index, (code, text) in zip(running, answers, strict=True):
            found[index] = code
            self._text[index] = (self._text[index] + text)[-20_000:]
            if index == 0 and text:
                print(text, end="", file=sys.stderr, flush=True)
        return found

    def _end_all(self, codes: list[int | None]) -> None:
        with contextlib.suppress(LostNodeError):
            self._get([actor.stop.remote() for actor, code in zip(self._actors, codes, strict=True) if code is None])

    def _cause(self, codes: list[int | None], first: int) -> WeftError:
        found = [error for text in self._text if (error := _last_error(text)) is not None]
        if found:
            return min(found, key=lambda error: error.exit_code)  # bad input before its consequences
        last = self._text[first].strip().splitlines()
        return RankError(
            f"node {first} ended with exit code {codes[first]}: {last[-1] if last else 'without a word'}",
            hint="--out continues from the newest checkpoint when it is launched again",
        )

    def _get(self, refs: Any) -> Any:
        exceptions = import_extra("ray", "ray.exceptions")
        try:
            return self._ray.get(refs, timeout=_CALL_S)
        except exceptions.RayActorError as error:
            raise LostNodeError(f"a node of the job was lost: {first_line(error)}") from None
        except exceptions.GetTimeoutError:
            raise LostNodeError(f"a node of the job has not answered in {_CALL_S:g} s") from None


def _agent(job: RayJob, *, node_rank: int, host: str, port: int) -> list[str]:
    sizes = ["--nodes", job.nodes, "--ranks", job.ranks_per_node, "--node-rank", node_rank]
    rest = ["--address", host, "--port", port, "--id", job.name, "--max-restarts", job.max_restarts, "--with-parent"]
    return [sys.executable, "-m", "weft.launch.node", *map(str, [*sizes, *rest])]


def _last_error(text: str) -> WeftError | None:
    """The last error that a rank has printed, with its hint."""
    by_code = {cls.code: cls for cls in error_classes()}
    found: WeftError | None = None
    for line in text.splitlines():
        match = _ERROR.match(line)
        if match is not None:
            found = by_code.get(match[1], RankError)(match[2])
        elif found is not None and line.startswith("hint: ") and not found.hint:
            found.hint = line.removeprefix("hint: ")
    return found


def _shown(resources: dict[str, float]) -> list[tuple[str, float]]:
    return [(name, amount) for name, amount in sorted(resources.items()) if name in ("CPU", "GPU")]
