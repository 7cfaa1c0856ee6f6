"""`weft launch`: write what a place takes to run a verb there, and with --submit hand it over."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # imported inside the verb, to keep `weft --help` fast
    from weft.launch.places.request import LaunchFile, LaunchRequest
    from weft.launch.places.settings import LaunchSettings


class LaunchPlace(StrEnum):
    LOCAL = "local"
    HOSTS = "hosts"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    RAY = "ray"


def launch(
    context: typer.Context,
    words: Annotated[
        list[str], typer.Argument(metavar="-- VERB ...", help="train, verify or server train, with its options.")
    ],
    on: Annotated[LaunchPlace, typer.Option(help="Where.")] = LaunchPlace.LOCAL,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it over; without, it is printed.")] = False,
    hosts: Annotated[
        str | None, typer.Option(help="--on hosts: gpu1:8,gpu2:8, or a file with one host and its ranks per line.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; default 1.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a node; default: the plan's ranks / nodes.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; default: that of run.toml.")] = None,
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="launch.toml: names and limits of the site.")
    ] = None,
    site: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value of launch.toml; may be repeated.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="section.key=a,b or plan=a.toml,b.toml: an array of jobs; may be repeated.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Folder to write the files into, instead of stdout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print files and the job's id as JSON on stdout.")] = False,
) -> None:
    """Run a verb on a cluster: weft launch --on slurm --nodes 2 -- train run.toml --plan plan.toml

    Without --submit it prints what the place takes (a batch script, manifests), to be read first."""
    root = context.find_root().command
    settings = _settings(settings_file, site or [])
    start: Callable[[], str]
    if on is LaunchPlace.HOSTS:
        files, start = _prepare_hosts(root, words, hosts, ranks_per_node, settings)
    else:
        request = _request(
            root,
            words,
            on=on,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            name=name,
            settings=settings,
            sweeps=sweep or [],
        )
        files = _write(on, request)
        start = functools.partial(_submit, on, request, files, root)
    if write is not None:
        _write_into(write, files)
    job = start() if submit else None
    if as_json:
        fields = [{"name": file.name, "text": file.text} for file in files]
        print(json.dumps({"on": on.value, "files": fields, "submitted": submit, "id": job}))
    elif submit:
        print(job)
    elif write is None:
        print("".join(file.text for file in files), end="")
    if not submit:
        print("not submitted: add --submit", file=sys.stderr)


def _prepare_hosts(
    root: Any, words: list[str], hosts: str | None, ranks_per_node: int | None, settings: LaunchSettings
) -> tuple[list[LaunchFile], Callable[[], str]]:
    from weft.cli.launch.hosts import hosts_request, run_on_hosts, write_hosts
    from weft.cli.launch.inner import parse_inner

    request = hosts_request(parse_inner(root, words), hosts, ranks_per_node=ranks_per_node, settings=settings)
    return [write_hosts(request)], functools.partial(run_on_hosts, request)


def _settings(path: Path | None, given: list[str]) -> LaunchSettings:
    from weft.cli.resolve import require_known_sections
    from weft.core.config import apply_settings, read_toml, sections_of
    from weft.launch.places.settings import LaunchSettings

    require_known_sections(given, known=sections_of(LaunchSettings))
    tables = apply_settings(read_toml(path) if path is not None else {}, given)
    return LaunchSettings.from_tables(tables, source=str(path or "--set"))


def _request(
    root: Any,
    words: list[str],
    *,
    on: LaunchPlace,
    nodes: int | None,
    ranks_per_node: int | None,
    name: str | None,
    settings: LaunchSettings,
    sweeps: list[str],
) -> LaunchRequest:
    from weft.cli.launch.inner import parse_inner
    from weft.cli.launch.sizes import count_nodes, ranks_of, require_one_node, require_resolvable
    from weft.cli.launch.sweep import expand_sweep
    from weft.core.errors import BadValueError
    from weft.launch.places.request import LaunchRequest, safe_name

    inner, variants = parse_inner(root, words), expand_sweep(sweeps)
    if variants and on is not LaunchPlace.SLURM:
        raise BadValueError(f"--sweep is an array of jobs, which --on {on} does not have", hint="--on slurm")
    num_nodes, per_node = count_nodes(ranks_of(inner), nodes=nodes, ranks_per_node=ranks_per_node)
    require_one_node(inner, nodes=num_nodes, place=on)
    on_gpus = on is not LaunchPlace.LOCAL and inner.verb != ("server", "train") and str(inner.values["device"]) != "cpu"
    for variant in variants or ((),):
        run_of_sweep = parse_inner(root, [*words, *variant])
        require_resolvable(run_of_sweep, num_ranks=num_nodes * per_node, on_gpu=on_gpus)
    run = inner.path("run")
    return LaunchRequest(
        verb=inner.verb,
        arguments=inner.arguments,
        name=safe_name(name or (run.stem if run is not None else "weft")),
        nodes=num_nodes,
        ranks_per_node=per_node,
        on_gpus=on_gpus,
        folder=Path.cwd(),
        out=str(inner.values["out"]) if inner.values.get("out") is not None else None,
        max_restarts=int(inner.values.get("max_restarts") or 0),
        settings=settings,
        variants=variants,
        documents=inner.documents,
    )


def _write(on: LaunchPlace, request: LaunchRequest) -> list[LaunchFile]:
    from weft.launch.places import jobset, local, ray_job, slurm, trainjob

    if on is LaunchPlace.KUBERNETES:
        is_trainjob = request.settings.kubernetes.kind == "trainjob"
        return trainjob.write_trainjob(request) if is_trainjob else jobset.write_jobset(request)
    if on is LaunchPlace.RAY:
        return ray_job.write_ray(request)
    return slurm.write_slurm(request) if on is LaunchPlace.SLURM else local.write_local(request)


def _submit(on: LaunchPlace, request: LaunchRequest, files: list[LaunchFile], root: Any) -> str:
    from weft.launch.places.local import local_words
    from weft.launch.places.submit import submit_kubernetes, submit_slurm

    text = "".join(file.text for file in files)
    if on is LaunchPlace.RAY:
        return _submit_ray(request, files, root)
    if on is LaunchPlace.LOCAL:
        return _run_here(root, local_words(request))
    return submit_slurm(text) if on is LaunchPlace.SLURM else submit_kubernetes(text)


def _submit_ray(request: LaunchRequest, files: list[LaunchFile], root: Any) -> str:
    import os

    from weft.core.extras import require_extra
    from weft.launch.places import ray_job

    if request.verb == ("server", "train"):
        return _run_here(root, ray_job.server_words(request))
    if ray_job.is_handed_over(request):
        return ray_job.submit_ray(request, files)
    require_extra("ray")
    from weft.launch.places.ray_nodes import run_on_ray

    run_on_ray(ray_job.build_job(request))
    return str(os.getpid())


def _run_here(root: Any, words: list[str]) -> str:
    """The verb in this process; its own output goes to stderr, which leaves stdout to the answer of the launch."""
    import contextlib
    import os

    with contextlib.redirect_stdout(sys.stderr):
        code = root.main(words, standalone_mode=False)
    if code:
        raise typer.Exit(code=code)
    return str(os.getpid())


def _write_into(folder: Path, files: list[LaunchFile]) -> None:
    from weft.cli.output import write_text

    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        write_text(folder / file.name, file.text)
