"""The few figures of a run on parameter servers that a reader wants first, from the ledger or else the other files.

Every figure may be None, which means "not known", never zero. The gate's bound on staleness, in units:

    a pull of step t sees at least (t - gate) * P units; until its push nobody gets beyond step t + gate
    staleness <= (t + gate + 1) * P - 1 - (t - gate) * P = (2 * gate + 1) * P - 1

and 0 where a step's gradients are summed and applied once (gate 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.units import format_count
from weft.report.facts import counted, steps_phrase
from weft.report.folder import number, rows, table
from weft.report.server_folder import ServerRunFolder, ServerStep, staleness_counts, train_seconds

LOST = ("server lost", "worker lost")


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What the head of the page says."""

    model: str
    mode: str | None
    servers: int | None
    workers: int | None
    status: str  # done | stopped | failed | unknown
    steps_done: int
    steps_asked: int | None
    first_loss: float | None
    final_loss: float | None
    eval_loss: float | None
    auc: float | None
    samples_per_s: float | None
    rows: float | None
    bytes: float | None
    staleness_mean: float | None  # units
    staleness_max: int | None
    staleness_bound: int | None  # None: there is none, or it is not known
    train_s: float | None
    elapsed_s: float | None
    restarts: int | None


def gather_server_facts(folder: ServerRunFolder) -> ServerFacts:
    """The head's figures of a folder."""
    run, steps = table(folder.ledger, "run"), folder.metrics.steps
    counts = staleness_counts(folder.figures)
    return ServerFacts(
        model=_model_name(folder),
        mode=_text(_told(folder, "mode")),
        servers=_whole(_told(folder, "servers")),
        workers=_whole(_told(folder, "workers")),
        status=_text(run.get("status")) or "unknown",
        steps_done=steps[-1].step if steps else 0,
        steps_asked=_whole(table(folder.run, "train").get("steps")),
        first_loss=number(steps[0].loss) if steps else None,
        final_loss=number(steps[-1].loss) if steps else None,
        eval_loss=_last(step.eval_loss for step in steps) or number(run.get("eval_loss")),
        auc=_last(step.auc for step in steps) or number(run.get("auc")),
        samples_per_s=number(run.get("samples_per_s")) or _rate(steps),
        rows=number(folder.ledger.get("rows")) or _sum_of_servers(folder, "rows"),
        bytes=number(folder.ledger.get("bytes")) or _sum_of_servers(folder, "bytes"),
        staleness_mean=sum(tau * count for tau, count in counts.items()) / sum(counts.values()) if counts else None,
        staleness_max=max(counts, default=None),
        staleness_bound=staleness_bound(folder),
        train_s=_train_s(steps) or number(run.get("train_s")),
        elapsed_s=number(run.get("elapsed_s")),
        restarts=_restarts(folder),
    )


def verdict(facts: ServerFacts) -> str:
    """The run in one line, below its model's name; what is not known is left out."""
    servers = counted(facts.servers, "server") if facts.servers else ""
    workers = counted(facts.workers, "worker") if facts.workers else ""
    parts = [facts.mode or "", " × ".join(part for part in (servers, workers) if part), steps_phrase(facts)]
    if facts.eval_loss is not None:
        parts.append(f"held-out loss {facts.eval_loss:.4g}")
    if facts.auc is not None:
        parts.append(f"AUC {facts.auc:.4f}")
    if facts.samples_per_s is not None:
        parts.append(f"{format_count(facts.samples_per_s)} samples/s")
    return " · ".join(part for part in parts if part)


def gate_of(folder: ServerRunFolder) -> int | None:
    """Steps that a worker may be ahead of the slowest; None: no bound, or not known."""
    spec = table(folder.run, "server")
    if spec.get("mode") == "sync":
        return 0
    return _whole(spec.get("staleness")) if spec.get("mode") == "async" else None


def staleness_bound(folder: ServerRunFolder) -> int | None:
    gate, workers = gate_of(folder), _whole(table(folder.run, "server").get("workers"))
    if gate is None or workers is None or gate == 0:
        return gate
    return (2 * gate + 1) * workers - 1


def run_names(folders: Sequence[ServerRunFolder]) -> list[str]:
    """Mode and folder of each run; of the path as much as tells them apart, and no more."""
    paths = [folder.path.resolve().parts for folder in folders]
    depth = next((d for d in range(1, max(map(len, paths)) + 1) if len({p[-d:] for p in paths}) == len(paths)), 1)
    modes = [_text(_told(folder, "mode")) for folder in folders]
    places = [str(Path(*parts[-depth:])) for parts in paths]
    return [" · ".join(part for part in (mode, place) if part) for mode, place in zip(modes, places, strict=True)]


def _told(folder: ServerRunFolder, name: str) -> Any:
    """Of run.toml's [server] table, or of the ledger where run.toml is missing."""
    spec = table(folder.run, "server")
    return spec[name] if name in spec else table(folder.ledger, "run").get(name)


def _model_name(folder: ServerRunFolder) -> str:
    spec = table(folder.run, "model")
    return _text(spec.get("factory")) or _text(spec.get("kind")) or "a model of unknown name"


def _train_s(steps: Sequence[ServerStep]) -> float | None:
    """Over all attempts of a resumed run; the ledger knows only the last."""
    clock = train_seconds(steps)
    return clock[-1] if clock else None


def _rate(steps: Sequence[ServerStep]) -> float | None:
    timed = [(step.samples, step.step_s) for step in steps if number(step.samples) and number(step.step_s)]
    seconds = sum(step_s for _, step_s in timed)
    return sum(samples for samples, _ in timed) / seconds if seconds > 0 else None


def _sum_of_servers(folder: ServerRunFolder, key: str) -> float | None:
    known = [size for size in (number(server.get(key)) for server in rows(folder.figures, "servers")) if size]
    return sum(known) if known else None


def _restarts(folder: ServerRunFolder) -> int | None:
    told = _whole(folder.ledger.get("restarts"))
    if told is not None or "events" not in folder.figures:
        return told
    return sum(event.get("event") in LOST for event in rows(folder.figures, "events"))


def _last(values: Iterable[float]) -> float | None:
    known = [value for value in map(number, values) if value is not None]
    return known[-1] if known else None


def _whole(value: object) -> int | None:
    """A count; one beyond any machine is taken for a mistake."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if isinstance(value, int) and is_count else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
