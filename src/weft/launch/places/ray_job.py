"""A job on Ray: a driver script, which a person can read, with one value that says all; `ray_nodes` runs it.

one bundle of a placement group per node, one actor in each, which runs the agent of that node
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from uuid import uuid4

from weft.core.errors import ConfigFileError
from weft.launch.places.local import local_words
from weft.launch.places.request import LaunchFile, LaunchRequest, shell, verb_words
from weft.launch.places.submit import hand_over

_SCRIPT = '''\
"""{what} on {nodes} nodes of {ranks} ranks. Written by `weft launch`; run it on the Ray cluster."""

from weft.launch.places.ray_job import RayJob
from weft.launch.places.ray_nodes import main

job = RayJob(
{fields})

if __name__ == "__main__":
    main(job)
'''


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """`words`: the verb and its arguments; those that name a document are replaced by its path on each node."""

    name: str
    words: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    cpus_per_node: int
    gpus_per_node: int
    folder: str
    has_agents: bool = True
    max_restarts: int = 0
    address: str = ""
    strategy: str = "STRICT_SPREAD"
    patience_s: float = 600.0
    resources: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)  # argument -> text


def build_job(request: LaunchRequest) -> RayJob:
    site = request.settings.ray
    words = verb_words(request)
    if request.has_agents:
        out = Path(request.out or f"runs/{request.name}")
        words += ["--out", str(out if out.is_absolute() else request.folder / out), "--continue"]
    return RayJob(
        name=request.name,
        words=tuple(words),
        nodes=request.nodes,
        ranks_per_node=request.ranks_per_node,
        cpus_per_node=site.cpus_per_rank * request.ranks_per_node,
        gpus_per_node=request.ranks_per_node if request.on_gpus else 0,
        folder=str(request.folder),
        has_agents=request.has_agents,
        max_restarts=request.max_restarts,
        address=site.address,
        strategy=site.strategy,
        patience_s=site.patience_s,
        resources=dict(site.resources),
        environment=dict(request.settings.job.environment),
        documents={given: _read(path) for given, path in request.documents.items()},
    )


def write_ray(request: LaunchRequest) -> list[LaunchFile]:
    """The driver script; parameter servers are Ray actors already, so theirs is a command line."""
    if request.verb == ("server", "train"):
        return [LaunchFile(name=f"{request.name}.sh", text=f"weft {shell(server_words(request))}\n")]
    job = build_job(request)
    if _is_remote(job.address):  # a job that the head submits is inside the cluster
        job = RayJob(**{**vars(job), "address": "auto"})
    shown = "".join(f"    {one.name}={getattr(job, one.name)!r},\n" for one in fields(job))
    what = "weft " + " ".join(request.verb)
    text = _SCRIPT.format(what=what, nodes=job.nodes, ranks=job.ranks_per_node, fields=shown)
    return [LaunchFile(name=f"{request.name.replace('-', '_')}_on_ray.py", text=text)]


def server_words(request: LaunchRequest) -> list[str]:
    address = request.settings.ray.address
    return [*local_words(request), "--launcher", "ray", *(["--address", address] if address else [])]


def submit_ray(request: LaunchRequest, files: list[LaunchFile]) -> str:
    """Hand the script to the head of a cluster (`ray job submit`); return the name of the job."""
    name = f"{request.name}-{uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        Path(folder, files[0].name).write_text(files[0].text, encoding="utf-8")
        options = ["--address", request.settings.ray.address, "--no-wait", "--submission-id", name]
        hand_over(["ray", "job", "submit", *options, "--working-dir", folder, "--", "python", files[0].name], "")
    return name


def is_handed_over(request: LaunchRequest) -> bool:
    """Whether a job server takes the script; otherwise this process is the driver."""
    return _is_remote(request.settings.ray.address)


def _is_remote(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} cannot be read: {error}", hint="check the path") from None
