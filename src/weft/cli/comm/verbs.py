"""`weft comm bench` and `weft comm explain`. Explaining needs no torch and no network."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.options import DeviceChoice
from weft.core.errors import BadValueError, InputError

SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB"
DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "uint8")
_DRAWN_RANKS = 16

comm_app = typer.Typer(
    name="comm", help="Collectives: measured, and drawn.", no_args_is_help=True, rich_markup_mode=None
)


@comm_app.callback()
def comm() -> None:
    """The eight collectives, out of sends and receives, beside those of the backend."""


@comm_app.command()
def bench(
    collective: Annotated[str, typer.Option(help="all_reduce, broadcast, …; several with commas; all.")] = "all_reduce",
    algorithm: Annotated[str, typer.Option(help="backend, ring, …; several with commas; all.")] = "all",
    nproc: Annotated[int | None, typer.Option(min=2, help="Ranks to start on this machine; default 2.")] = None,
    sizes: Annotated[str, typer.Option(help="Bytes of the full tensor, as 64KiB,1MiB.")] = SIZES,
    dtype: Annotated[str, typer.Option(help="Of the elements: float32, bfloat16, int32, …")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats, of which the median counts.")] = 7,
    per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node; default: of this host.")] = None,
    device: Annotated[
        DeviceChoice, typer.Option(help="Whose memory is sent; auto takes the GPUs when there are any.")
    ] = DeviceChoice.AUTO,
    calibrate: Annotated[
        Path | None, typer.Option(help="Write the link's figures to this file, for weft plan.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="The link that they are of, as loopback; default: found.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write an HTML page with the curves.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and fit as JSON on stdout.")] = False,
) -> None:
    """Time collectives over sizes and algorithms, and fit latency and bandwidth; under torchrun on its ranks."""
    from weft.train.ranks.environment import given_ranks

    collectives, algorithms = _chosen(collective, algorithm)
    asked: dict[str, Any] = {
        "collectives": collectives,
        "algorithms": algorithms,
        "sizes": _sizes(sizes),
        "dtype": _dtype(dtype),
        "repeats": repeats,
        "per_node": per_node,
        "device": device.value,
    }
    if link is not None:
        _require_link(link)
    outside = given_ranks(os.environ)
    _require_nodes(algorithm, per_node, outside or nproc or 2)
    answer = _launched(asked, num_ranks=nproc or 2) if outside is None else _as_rank(asked)
    if answer is not None:  # rank 0 has it
        _show(answer, calibrate=calibrate, link=link, out=out, as_json=as_json)


@comm_app.command()
def explain(
    collective: Annotated[str, typer.Argument(help="all_reduce, broadcast, scatter, all_to_all, …")],
    ranks: Annotated[int, typer.Option(min=2, max=_DRAWN_RANKS, help="Ranks.")] = 4,
    algorithm: Annotated[str | None, typer.Option(help="ring, star, …; default: the first of the collective.")] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node; default: two halves.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rounds as JSON on stdout.")] = False,
) -> None:
    """Draw the steps of a collective, chunk by chunk: who sends what to whom, and what every rank has then."""
    from weft.comm.algorithms.draw import as_tables, drawn
    from weft.comm.algorithms.registry import ALGORITHMS
    from weft.comm.algorithms.rounds import CollectiveTask

    ways = ALGORITHMS[_known("collective", collective, ALGORITHMS)]
    chosen = ways[_known(f"algorithm of {collective}", algorithm or next(iter(ways)), ways)]
    nodes = per_node or (ranks // 2 if ranks % 2 == 0 else ranks)
    if refusal := chosen.refusal(ranks, nodes):
        raise BadValueError(refusal, hint="set --per-node to a divisor of --ranks")
    task = CollectiveTask(num_ranks=ranks, count=ranks, per_node=nodes)
    print(json.dumps(as_tables(chosen, task)) if as_json else drawn(chosen, task))


def _known(kind: str, name: str, known: Any) -> str:
    if name not in known:
        raise BadValueError(f"there is no {kind} {name!r}", hint=" | ".join(known))
    return name


def _chosen(collective: str, algorithm: str) -> tuple[list[str], list[str]]:
    from weft.comm.algorithms.registry import ALGORITHMS, COLLECTIVES

    collectives = list(COLLECTIVES) if collective == "all" else collective.split(",")
    for name in collectives:
        _known("collective", name, (*COLLECTIVES, "all"))
    known = ["backend", *dict.fromkeys(name for one in collectives for name in ALGORITHMS[one])]
    algorithms = known if algorithm == "all" else algorithm.split(",")
    for name in algorithms:
        _known(f"algorithm of {' or '.join(collectives)}", name, (*known, "all"))
    return collectives, algorithms


def _sizes(text: str) -> list[int]:
    from weft.core.units import parse_bytes

    found = [parse_bytes(part) for part in text.split(",")]
    if min(found) < 1:
        raise BadValueError(f"--sizes {text}: a tensor has at least 1 byte", hint="write --sizes 64KiB,1MiB")
    return found


def _dtype(name: str) -> str:
    return _known("dtype", name, DTYPES)


def _require_link(name: str) -> None:
    from weft.hardware import catalogue

    catalogue.table("links", name)


def _require_nodes(algorithm: str, per_node: int | None, num_ranks: int) -> None:
    if per_node is not None and num_ranks % per_node and "hierarchical" in algorithm.split(","):
        raise BadValueError(
            f"hierarchical needs nodes of equal size, and --per-node {per_node} does not divide {num_ranks} ranks",
            hint="set --per-node to a divisor of the number of ranks",
        )


def _launched(asked: dict[str, Any], *, num_ranks: int) -> dict[str, Any]:
    from weft.launch.local import launch

    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        job, answer = Path(scratch) / "bench.json", Path(scratch) / "answer.json"
        job.write_text(json.dumps({**asked, "answer": str(answer)}), encoding="utf-8")
        launch([sys.executable, "-m", "weft.cli.comm.rank", str(job)], num_ranks=num_ranks, scratch=Path(scratch))
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def _as_rank(asked: dict[str, Any]) -> dict[str, Any] | None:
    from weft.cli.comm.rank import measure
    from weft.train.ranks.process import report_failures

    with report_failures():
        return measure(asked)


def _show(answer: dict[str, Any], *, calibrate: Path | None, link: str | None, out: Path | None, as_json: bool) -> None:
    from weft.cli.comm.view import text_of
    from weft.cli.output import write_text

    if as_json:
        print(json.dumps(answer))
    else:
        print(text_of(answer))
    if out is not None:
        from weft.report.comm import write_comm_page

        print(f"wrote {write_comm_page(answer, out)}", file=sys.stderr)
    if calibrate is not None:
        from weft.hardware.calibration import with_link

        write_text(
            calibrate, with_link(calibrate, link or answer["link"], _figures(answer), measured=answer["machine"])
        )


def _figures(answer: dict[str, Any]) -> dict[str, float]:
    """The link's figures for a calibration."""
    fit = answer["fit"]
    if not fit["beta_s_per_byte"]:
        raise InputError(
            "no bandwidth can be read from these times: they do not grow with the size",
            hint="measure larger tensors as well, --sizes 64KiB,64MiB, on a machine that does nothing else",
        )
    return {"latency_s": fit["alpha_s"], "bytes_per_s": 1 / fit["beta_s_per_byte"]}
