"""The command line of a launch on this machine: the verb itself, with its number of ranks."""

from __future__ import annotations

from weft.launch.places.request import LaunchFile, LaunchRequest, shell


def local_words(request: LaunchRequest) -> list[str]:
    """The verb and its arguments, without `weft`."""
    words = [*request.verb, *request.arguments]
    if request.verb != ("server", "train"):
        words += ["--nproc", str(request.num_ranks)]
    if request.out is not None:
        words += ["--out", request.out]
    if request.max_restarts:
        words += ["--max-restarts", str(request.max_restarts)]
    return words


def write_local(request: LaunchRequest) -> list[LaunchFile]:
    return [LaunchFile(name=f"{request.name}.sh", text=f"weft {shell(local_words(request))}\n")]
