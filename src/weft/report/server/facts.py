"""The figures of a run on parameter servers for the head of its page, from the ledger or else from the other files.

None means "not known", never zero. The gate's bound on staleness, in units:

    a pull of step t sees at least (t - gate) * P units; before its push no worker passes step t + gate
    staleness <= (t + gate + 1) * P - 1 - (t - gate) * P = (2 * gate + 1) * P - 1

and 0 where a step's gradients are summed and applied once (gate 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.report.facts import Facts, common_facts, counted, model_name, one_line, phrase
from weft.report.fields import count, last_known, number, rows, table, word
from weft.report.folder import ServerFolder, ServerStep, train_seconds

LOST = ("server lost", "worker lost")


@dataclass(frozen=True, kw_only=True)
class ServerFacts(Facts):
    mode: str | None
    servers: int | None
    workers: int | None
    auc: float | None
    samples_per_s: float | None
    rows: float | None
    bytes: float | None
    staleness_mean: float | None  # units
    staleness_max: int | None
    staleness_bound: int | None  # None: there is none, or it is not known
    train_s: float | None
    restarts: int | None


def gather_server_facts(folder: ServerFolder) -> ServerFacts:
    run, model, steps = table(folder.ledger, "run"), table(folder.run, "model"), folder.metrics.steps
    counts = staleness_counts(folder.servers)
    clock = train_seconds(steps)  # over all attempts of a resumed run; the ledger has only the last
    return ServerFacts(
        **common_facts(folder),
        model=model_name(model.get("factory"), model.get("kind")),
        mode=word(_recorded(folder, "mode")),
        servers=count(_recorded(folder, "servers")),
        workers=count(_recorded(folder, "workers")),
        first_loss=number(steps[0].loss) if steps else None,
        eval_loss=last_known(step.eval_loss for step in steps) or number(run.get("eval_loss")),
        auc=last_known(step.auc for step in steps) or number(run.get("auc")),
        samples_per_s=number(run.get("samples_per_s")) or _rate(steps),
        rows=number(folder.ledger.get("rows")) or _sum_of_servers(folder, "rows"),
        bytes=number(folder.ledger.get("bytes")) or _sum_of_servers(folder, "bytes"),
        staleness_mean=sum(tau * pushes for tau, pushes in counts.items()) / sum(counts.values()) if counts else None,
        staleness_max=max(counts, default=None),
        staleness_bound=staleness_bound(folder),
        train_s=(clock[-1] if clock else None) or number(run.get("train_s")),
        restarts=_restarts(folder),
    )


def verdict(facts: ServerFacts) -> str:
    """The run in one line, below its model's name, without unknown figures."""
    servers = counted(facts.servers, "server") if facts.servers else ""
    workers = counted(facts.workers, "worker") if facts.workers else ""
    return one_line(
        facts.mode,
        " × ".join(part for part in (servers, workers) if part),
        facts.steps_phrase,
        phrase(facts.eval_loss, "held-out loss {:.4g}"),
        phrase(facts.auc, "AUC {:.4f}"),
        phrase(facts.samples_per_s, "{count} samples/s"),
    )


def gate_of(folder: ServerFolder) -> int | None:
    """Steps that a worker may be ahead of the slowest; None: no bound, or not known."""
    spec = table(folder.run, "server")
    if spec.get("mode") == "sync":
        return 0
    return count(spec.get("staleness")) if spec.get("mode") == "async" else None


def staleness_bound(folder: ServerFolder) -> int | None:
    gate, workers = gate_of(folder), count(table(folder.run, "server").get("workers"))
    if gate is None or workers is None or gate == 0:
        return gate
    return (2 * gate + 1) * workers - 1


def staleness_counts(servers: dict[str, Any]) -> dict[int, float]:
    """Pushes by staleness in units, ascending."""
    pairs = table(servers, "staleness").items()
    counts = {int(tau): number(pushes) or 0.0 for tau, pushes in pairs if tau.isdecimal() and len(tau) < 12}
    return {tau: counts[tau] for tau in sorted(counts) if counts[tau] > 0}


def run_names(folders: Sequence[ServerFolder]) -> list[str]:
    """Mode and folder of each run, with as much of the path as makes the names distinct."""
    paths = [folder.path.resolve().parts for folder in folders]
    depth = next((d for d in range(1, max(map(len, paths)) + 1) if len({p[-d:] for p in paths}) == len(paths)), 1)
    modes = [word(_recorded(folder, "mode")) for folder in folders]
    return [one_line(mode, str(Path(*parts[-depth:]))) for mode, parts in zip(modes, paths, strict=True)]


def _recorded(folder: ServerFolder, name: str) -> Any:
    """From run.toml's [server] table, or from the ledger where run.toml is missing."""
    spec = table(folder.run, "server")
    return spec[name] if name in spec else table(folder.ledger, "run").get(name)


def _rate(steps: Sequence[ServerStep]) -> float | None:
    timed = [(step.samples, step.step_s) for step in steps if number(step.samples) and number(step.step_s)]
    seconds = sum(step_s for _, step_s in timed)
    return sum(samples for samples, _ in timed) / seconds if seconds > 0 else None


def _sum_of_servers(folder: ServerFolder, key: str) -> float | None:
    known = [size for size in (number(server.get(key)) for server in rows(folder.servers, "servers")) if size]
    return sum(known) if known else None


def _restarts(folder: ServerFolder) -> int | None:
    recorded = count(folder.ledger.get("restarts"))
    if recorded is not None or "events" not in folder.servers:
        return recorded
    return sum(event.get("event") in LOST for event in rows(folder.servers, "events"))
