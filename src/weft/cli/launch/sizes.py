"""Nodes and ranks of a launch, from the plan and the options: ranks = nodes x ranks per node. No torch."""

from __future__ import annotations

from typing import Any

from weft.cli.launch.inner import InnerVerb
from weft.core.errors import BadValueError, MeshError
from weft.core.plan import Plan


def count_nodes(num_ranks: int | None, *, nodes: int | None, ranks_per_node: int | None) -> tuple[int, int]:
    """(nodes, ranks per node); `num_ranks` is the plan's, if it has a mesh."""
    if num_ranks is None:
        return nodes or 1, ranks_per_node or 1
    if nodes is None:
        nodes = num_ranks // ranks_per_node if ranks_per_node else 1
    if nodes < 1 or num_ranks % nodes or (ranks_per_node or num_ranks // nodes) * nodes != num_ranks:
        asked = f"{nodes or 1} nodes of {ranks_per_node} ranks" if ranks_per_node else f"{nodes} nodes"
        fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        shown = ", ".join(f"--nodes {n} --ranks-per-node {num_ranks // n}" for n in fitting[:8])
        raise MeshError(f"the plan has {num_ranks} ranks, which do not divide over {asked}", hint=f"fitting: {shown}")
    return nodes, num_ranks // nodes


def ranks_of(inner: InnerVerb) -> int | None:
    """The ranks that the verb's own arguments ask for; None for a plan without a mesh."""
    if inner.verb == ("server", "train"):
        return _server_processes(inner)
    tables = plan_tables_of(inner)
    if inner.values.get("nproc") is not None:
        return int(inner.values["nproc"])
    return Plan.from_tables(tables, source=_source(inner)).num_ranks if "mesh" in tables else None


def require_resolvable(inner: InnerVerb, *, num_ranks: int, on_gpu: bool) -> None:
    """Resolve the plan as its ranks will: an illegal one is refused before it is queued."""
    from weft.cli.resolve import require_known_sections, resolve_run
    from weft.plan.resolve import resolve

    if inner.verb != ("server", "train"):
        require_known_sections(inner.settings)
        spec = resolve_run(inner.path("run"), inner.settings)
        resolve(plan_tables_of(inner), spec, on_gpu=on_gpu, num_ranks=num_ranks, source=_source(inner))


def require_one_node(inner: InnerVerb, *, nodes: int, place: str) -> None:
    if nodes > 1 and inner.verb != ("train",):
        name = " ".join(inner.verb)
        raise BadValueError(
            f"`weft {name}` starts its own processes on one node; --on {place} was given {nodes}",
            hint="--nodes 1" if inner.verb == ("verify",) else "--nodes 1, or --on ray for servers on several hosts",
        )


def plan_tables_of(inner: InnerVerb) -> dict[str, Any]:
    from weft.cli.resolve import plan_tables

    return plan_tables(inner.path("plan"), inner.settings)


def _source(inner: InnerVerb) -> str:
    return str(inner.path("plan") or "the plan")


def _server_processes(inner: InnerVerb) -> int:
    from weft.cli.server import resolve

    counts = [f"server.{key}={inner.values[key]}" for key in ("servers", "workers") if inner.values[key] is not None]
    spec = resolve(inner.path("run"), [*inner.settings, *counts])
    return spec.server.servers + spec.server.workers
