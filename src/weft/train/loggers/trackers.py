"""Trackers of `[track]`: Weights & Biases, MLflow, trackio. Rank 0 only; a training never waits or fails for one.

Each tracker has a thread, which imports the library, opens the run and writes what the queue has. The first exception
is one line on stderr and ends that tracker. At the end of the run the thread has CLOSE_S seconds to finish.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from weft.core.errors import first_line
from weft.core.extras import import_extra
from weft.core.run_spec import RunSpec
from weft.core.track_spec import TrackerName

CLOSE_S = 60.0
REACH_S = 3.0
MAX_WAITING = 100_000  # steps; beyond, a tracker that does not keep up loses the newest

Values = Mapping[str, float]


class Tracker(Protocol):
    """An open run of a tracker."""

    def write(self, step: int, values: Values) -> None: ...

    def close(self, *, is_finished: bool) -> None: ...


class Trackers:
    """All trackers of a run; `write` and `close` return at once, or after CLOSE_S at the latest."""

    def __init__(self, run: RunSpec, folder: Path) -> None:
        self._threads = [_TrackerThread(name, run, folder) for name in dict.fromkeys(run.track.kind)]

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        known = {key: float(value) for key, value in values.items() if value is not None}
        for thread in self._threads:
            thread.put((step, known))

    def close(self, *, is_finished: bool) -> None:
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.put(is_finished)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))


class _TrackerThread:
    def __init__(self, name: TrackerName, run: RunSpec, folder: Path) -> None:
        self._name, self._run, self._folder = name, run, folder
        self._queue: queue.Queue[tuple[int, Values] | bool] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, item: tuple[int, Values] | bool) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._note("did not finish in time; its last steps may be missing there")

    def _work(self) -> None:
        try:
            tracker = OPENERS[self._name](self._run, self._folder)
            while not isinstance(item := self._queue.get(), bool):
                tracker.write(*item)
            tracker.close(is_finished=item)
        except BaseException as error:  # a library may end its process with SystemExit
            self._note(f"gets no more steps: {type(error).__name__}: {first_line(error)}")

    def _note(self, words: str) -> None:
        print(f"note: the tracker {self._name} {words}", file=sys.stderr)


class WandbRun:
    """Online if its server can be reached; a resumed run continues under its id."""

    def __init__(self, run: RunSpec, folder: Path) -> None:
        wandb = import_extra("wandb")
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        is_offline = _is_offline(run.track.offline, server)
        given = {} if os.environ.get("WANDB_MODE") else {"mode": "offline" if is_offline else "online"}
        self._run = wandb.init(
            project=run.track.project,
            name=_name(run, folder),
            id=_identity(folder),
            resume="allow",
            dir=str(folder),
            config=_config(run),
            **given,
        )

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MlflowRun:
    """To MLFLOW_TRACKING_URI, or into mlflow.db of the run folder."""

    def __init__(self, run: RunSpec, folder: Path) -> None:
        self._mlflow = import_extra("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri or _is_offline(run.track.offline, uri):
            uri = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(run.track.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.track.project)
        identity = {"weft.run": _identity(folder)}
        earlier = self._client.search_runs([experiment], f"tags.`weft.run` = '{identity['weft.run']}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, tags=identity, run_name=_name(run, folder)).info.run_id
            for key, value in _flat(_config(run)).items():
                self._client.log_param(self._id, key, str(value)[:500])

    def write(self, step: int, values: Values) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(key, value, now_ms, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, *, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "FAILED")


class TrackioRun:
    """trackio is local: its database is in its own cache."""

    def __init__(self, run: RunSpec, folder: Path) -> None:
        trackio = import_extra("trackio")
        self._run = trackio.init(
            project=run.track.project, name=_name(run, folder), config=_flat(_config(run)), resume="allow", embed=False
        )

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, is_finished: bool) -> None:
        self._run.finish()


OPENERS: dict[TrackerName, Callable[[RunSpec, Path], Tracker]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
}


def _name(run: RunSpec, folder: Path) -> str:
    return run.track.name or folder.absolute().name


def _identity(folder: Path) -> str:
    """The same for a resume in the same folder."""
    path = folder.absolute()
    return f"{path.name[:40]}-{zlib.crc32(str(path).encode()):08x}"


def _config(run: RunSpec) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude_none=True)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _is_offline(asked: bool | None, server: str) -> bool:
    """As asked; else whether the server cannot be reached. A path or a file: address needs no network."""
    url = urlsplit(server)
    if asked is not None or url.scheme not in ("http", "https"):
        return bool(asked)
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname or "", port), timeout=REACH_S).close()
    except OSError:
        return True
    return False
