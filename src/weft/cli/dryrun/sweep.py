"""`weft dryrun --sweep`: the same step at several values of one key, one dry run per value, on all cores.

KEY=V1,V2,… runs those values. KEY alone doubles the value until it no longer fits, then interpolates linearly between
the known peaks to find the largest value that fits. The search assumes that memory grows with the value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.cli.dryrun.question import DryRunQuestion
from weft.cli.dryrun.view import ProgressBar
from weft.core import plan as plans
from weft.core import run_spec as runs
from weft.core.config import apply_settings
from weft.core.errors import BadValueError, InputError, UnknownKeyError, WeftError
from weft.core.run_spec import RunSpec
from weft.core.units import format_bytes
from weft.dryrun.fit import EXPANDABLE
from weft.dryrun.many import dry_runs, worker_processes
from weft.dryrun.record import DryRun

MICROBATCH = "microbatch"  # rows of one micro-batch on one rank; the global batch follows
SEQUENCE_STEP = 256
MAX_RUNS = 20


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One value and the outcome of its dry run."""

    value: Any
    peak_bytes: int | None = None
    reserved_bytes: int | None = None  # with expandable segments
    needed_bytes: int | None = None  # on the named device
    fits: bool | None = None
    error: str | None = None


def run_sweep(question: DryRunQuestion, sweep: str, *, rank: int, as_json: bool) -> int:
    """Print the sweep; returns the exit code."""
    key, has_values, listed = sweep.partition("=")
    _require_key(key, sweep)
    values = _values(listed, sweep) if has_values else None
    with worker_processes() as processes:

        def ask(wanted: list[Any]) -> list[SweepRow]:
            return _rows(question, key, wanted, rank=rank, processes=processes)

        rows = ask(values) if values is not None else _search(question, key, ask)
    if all(row.error is not None for row in rows):
        raise InputError(
            f"--sweep {sweep}: {rows[0].error}", hint="every value failed; try weft dryrun without --sweep"
        )
    if as_json:
        print(json.dumps(as_dict(question, key, rows)))
    else:
        _show(question, key, rows, is_listed=bool(has_values))
    return 1 if question.cluster is not None and not any(row.fits for row in rows) else 0


def as_dict(question: DryRunQuestion, key: str, rows: list[SweepRow]) -> dict[str, Any]:
    """The object that --json prints."""
    device = question.cluster.device if question.cluster is not None else None
    return {
        "sweep": {"key": key, "rows": [asdict(row) for row in rows], "largest_fitting": largest_fitting(rows)},
        "device": device.name if device else None,
        "capacity_bytes": device.memory_bytes if device else None,
    }


def largest_fitting(rows: list[SweepRow]) -> Any:
    """The largest number that fits; None where no value fits or the values are not numbers."""
    fitting = [row.value for row in rows if row.fits and _is_number(row.value)]
    return max(fitting, default=None)


def changed(question: DryRunQuestion, key: str, value: Any) -> DryRunQuestion:
    """The same question with one key changed."""
    run, tables, plan = question.run, question.asked, question.plan
    if key == MICROBATCH:
        key, value = "train.global_batch", value * plan.mesh.dp_degree * plan.pipeline.microbatches
    setting = [f"{key}={json.dumps(value)}"]
    if key.partition(".")[0] in runs.SECTIONS:
        run = RunSpec.from_tables(apply_settings(run.model_dump(), setting), source="--sweep")
    else:
        tables = apply_settings(tables, setting)
    return DryRunQuestion.of(run, tables, question.device, source="--sweep")  # resolved anew for every value


def next_values(rows: dict[int, SweepRow], *, start: int, step: int, capacity_bytes: int) -> list[int]:
    """The values to try after `rows`; none when the largest that fits is known."""
    fitting = [value for value, row in rows.items() if row.fits]
    failing = [value for value, row in rows.items() if not row.fits]
    if not rows:
        return [start, 2 * start]
    if not failing:
        return [2 * max(fitting), 4 * max(fitting)]
    if not fitting:
        half = min(failing) // 2 // step * step
        return [half] if half >= step else []
    return _between(rows, low=max(fitting), high=min(failing), step=step, capacity_bytes=capacity_bytes)


def _between(rows: dict[int, SweepRow], *, low: int, high: int, step: int, capacity_bytes: int) -> list[int]:
    """The multiple of `step` where the line through both ends meets the capacity, and its neighbour.

    Where the line missed once, memory is not linear: the midpoint too, so that the interval at least halves.
    """
    first, last = low // step * step + step, (high - 1) // step * step
    if first > last:
        return []
    middle = min(max((low + high) // 2 // step * step, first), last)
    below, above = rows[low].needed_bytes, rows[high].needed_bytes
    if below is None or above is None or above <= below:
        return [middle]
    crossing = low + int((capacity_bytes - below) / (above - below) * (high - low))
    guess = min(max(crossing // step * step, first), last)
    return sorted({guess, min(guess + step, last), *([middle] if high < 2 * low else [])})


def _search(question: DryRunQuestion, key: str, ask: Callable[[list[Any]], list[SweepRow]]) -> list[SweepRow]:
    start, step = _start_and_step(question, key)
    if question.cluster is None:
        raise BadValueError(f"--sweep {key} without values needs a device to fit on", hint="name one: --device H200")
    rows: dict[int, SweepRow] = {}
    while len(rows) < MAX_RUNS:
        wanted = [
            value
            for value in next_values(rows, start=start, step=step, capacity_bytes=question.cluster.device.memory_bytes)
            if value not in rows
        ]
        if not wanted:
            break
        rows |= {row.value: row for row in ask(wanted)}
    return [rows[value] for value in sorted(rows)]


def _start_and_step(question: DryRunQuestion, key: str) -> tuple[int, int]:
    plan, batch = question.plan, question.run.train.global_batch
    pieces = plan.mesh.dp_degree * plan.pipeline.microbatches
    match key:
        case "data.sequence_length":
            return question.run.data.sequence_length, SEQUENCE_STEP
        case "microbatch":
            return batch // pieces, 1
        case "train.global_batch":
            return batch, pieces
    raise BadValueError(
        f"--sweep {key}: a search needs data.sequence_length, microbatch or train.global_batch",
        hint=f"give values: --sweep {key}=V1,V2",
    )


def _rows(
    question: DryRunQuestion, key: str, values: list[Any], *, rank: int, processes: ProcessPoolExecutor
) -> list[SweepRow]:
    """One dry run per value, in parallel."""
    asked: dict[int, DryRunQuestion] = {}
    rows: dict[int, SweepRow] = {}
    for place, value in enumerate(values):
        try:
            asked[place] = changed(question, key, value)
        except UnknownKeyError:
            raise
        except WeftError as error:
            rows[place] = SweepRow(value=value, error=error.message)
    jobs = [one.job(rank=rank, memory_only=True) for one in asked.values()]
    listed = ", ".join(f"{value:,}" if _is_number(value) else str(value) for value in values)
    with ProgressBar(f"{key} = {listed}", total=len(jobs)) as progress:
        outcomes = dry_runs(jobs, on_done=progress.advance, processes=processes)
    for (place, one), outcome in zip(asked.items(), outcomes, strict=True):
        rows[place] = _row(one, values[place], outcome)
    return [rows[place] for place in range(len(values))]


def _row(question: DryRunQuestion, value: Any, outcome: DryRun | WeftError) -> SweepRow:
    if isinstance(outcome, WeftError):
        return SweepRow(value=value, error=outcome.message)
    fit = question.fit(outcome)
    return SweepRow(
        value=value,
        peak_bytes=outcome.peak_bytes,
        reserved_bytes=outcome.reserved_bytes.get(EXPANDABLE),
        needed_bytes=fit.needed_bytes if fit else None,
        fits=fit.fits if fit else None,
    )


def _require_key(key: str, sweep: str) -> None:
    section, dot, name = key.partition(".")
    known = (*runs.SECTIONS, *plans.SECTIONS)
    if key != MICROBATCH and (not dot or not name or section not in known):
        raise BadValueError(
            f"--sweep {sweep!r} is not section.key=V1,V2,…",
            hint="for example --sweep data.sequence_length=2048,4096, or --sweep microbatch",
        )


def _values(listed: str, sweep: str) -> list[Any]:
    texts = [text.strip() for text in listed.split(",")]
    if not all(texts):
        raise BadValueError(f"--sweep {sweep!r} has an empty value", hint="--sweep KEY=V1,V2,…")
    values = [apply_settings({}, [f"x.y={text}"])["x"]["y"] for text in texts]
    if sweep.startswith(f"{MICROBATCH}=") and not all(isinstance(value, int) and value > 0 for value in values):
        raise BadValueError(
            f"--sweep {sweep!r}: rows per micro-batch are integers above 0", hint="--sweep microbatch=1,2,4"
        )
    return values


def _show(question: DryRunQuestion, key: str, rows: list[SweepRow], *, is_listed: bool) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in (key, "peak", "reserved", "fits"):
        table.add_column(name, justify="right" if name != "fits" else "left")
    for row in rows:
        cells = [format_bytes(nbytes) if nbytes is not None else "" for nbytes in (row.peak_bytes, row.reserved_bytes)]
        table.add_row(f"{row.value:,}" if _is_number(row.value) else str(row.value), *cells, _fits_text(row))
    Console(file=sys.stdout, highlight=False).print(table)
    if question.cluster is not None:
        print(sentence(key, rows, device=question.cluster.device.name, is_listed=is_listed))


def sentence(key: str, rows: list[SweepRow], *, device: str, is_listed: bool) -> str:
    best = largest_fitting(rows)
    if best is not None:
        of_these = " of these" if is_listed else ""
        return f"the largest {key}{of_these} that fits on {device} is {best:,}"
    fitting = [str(row.value) for row in rows if row.fits]
    return f"fits on {device} with {key} = {', '.join(fitting)}" if fitting else f"none fits on {device}"


def _fits_text(row: SweepRow) -> str:
    if row.error is not None:
        return row.error
    return {True: "yes", False: "no", None: ""}[row.fits]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
