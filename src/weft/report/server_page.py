"""The page of a run on parameter servers: folder -> facts, charts, tables -> sections. The page around is in shell.

With other runs beside it the curves of all are drawn together; everything else is of the first run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.core.units import format_bytes, format_count, format_seconds
from weft.report import server_tables, shell
from weft.report.chart import Chart
from weft.report.facts import steps_phrase
from weft.report.folder import RUN, table
from weft.report.markup import NOTHING, Markup, facts_list, join, section, tag, text
from weft.report.server_bars import draw_histogram, draw_hot_keys, draw_servers, draw_workers
from weft.report.server_curves import draw_beside, draw_server_curves
from weft.report.server_facts import ServerFacts, gather_server_facts, run_names, verdict
from weft.report.server_folder import ServerRunFolder, read_server_folder
from weft.report.server_load import hot_keys, server_loads, update_word, waiting_share, worker_loads
from weft.report.shell import chart_box, chart_boxes, document, tile
from weft.report.tables import absent

MAX_HOT_TABLES = 6  # of a model with many tables, those named first

_LINKS = [
    ("curves", "Curves"),
    ("staleness", "Staleness"),
    ("servers", "Servers"),
    ("workers", "Workers"),
    ("hot-keys", "Hot keys"),
    ("events", "Events"),
    ("documents", "Run"),
    ("environment", "Environment"),
]


def write_server_page(run_dir: Path, *, beside: Sequence[Path] = ()) -> Path:
    """Read, draw, write; returns the path of report.html, in the first run's folder."""
    folder = read_server_folder(run_dir)
    others = [read_server_folder(other) for other in _distinct(run_dir, beside)]
    return shell.write_text(run_dir, render_server_page(folder, beside=others))


def render_server_page(folder: ServerRunFolder, *, beside: Sequence[ServerRunFolder] = ()) -> str:
    """The page as text."""
    facts = gather_server_facts(folder)
    title = f"{facts.model} · {facts.mode or 'parameter servers'} · {steps_phrase(facts)}"
    remarks = [
        *folder.remarks,
        *(f"{other.path.resolve().name}: {remark}" for other in beside for remark in other.remarks),
    ]
    return shell.fill(
        title=title,
        head=shell.head(title=facts.model, status=facts.status, verdict=verdict(facts), remarks=remarks),
        links=[*([("beside", "Beside other runs")] if beside else []), *_LINKS],
        main=_main(facts, folder, beside),
    )


def _distinct(run_dir: Path, beside: Sequence[Path]) -> list[Path]:
    """A run given twice is drawn once."""
    places = {run_dir.resolve(): run_dir}
    for other in beside:
        places.setdefault(other.resolve(), other)
    return list(places.values())[1:]


def _main(facts: ServerFacts, folder: ServerRunFolder, beside: Sequence[ServerRunFolder]) -> Markup:
    return join(
        [
            tag("div", *_tiles(facts, folder), class_="tiles"),
            section(_beside(facts, folder, beside), key="beside", title="Beside other runs"),
            section(_curves(folder), key="curves", title="Curves"),
            section(_staleness(facts, folder), key="staleness", title="Staleness"),
            section(_servers(folder), key="servers", title="Servers"),
            section(_workers(folder), key="workers", title="Workers"),
            section(_hot_keys(folder), key="hot-keys", title="Hot keys"),
            section(server_tables.events(folder), key="events", title="Events"),
            section(document(RUN, folder.run_text), key="documents", title="Run, as resolved"),
            section(_environment(folder), key="environment", title="Environment"),
        ]
    )


def _tiles(facts: ServerFacts, folder: ServerRunFolder) -> list[Markup]:
    elapsed = f"of training; {format_seconds(facts.elapsed_s)} in all" if facts.elapsed_s is not None else "of training"
    first = f"from {facts.first_loss:.4g}" if facts.first_loss is not None and facts.steps_done > 1 else ""
    asked = f"of {facts.steps_asked:,} asked" if facts.steps_asked is not None else ""
    return [
        tile("Final loss", facts.final_loss, show="{:.4g}".format, note=first),
        tile("Held-out loss", facts.eval_loss, show="{:.4g}".format, note="last evaluation"),
        tile("AUC", facts.auc, show="{:.4f}".format, note="last evaluation"),
        tile("Samples / s", facts.samples_per_s, show=format_count, note="over all workers"),
        tile("Rows in tables", facts.rows, show=format_count, note="over all servers"),
        tile("Memory of tables", facts.bytes, show=format_bytes, note="over all servers"),
        tile("Staleness, mean", facts.staleness_mean, show="{:.2f}".format, note=_staleness_note(facts)),
        tile("Staleness, largest", facts.staleness_max, show="{:,}".format, note=_bound_note(facts)),
        tile("Waiting", waiting_share(worker_loads(folder)), show="{:.0%}".format, note="of the workers' time"),
        tile("Steps", facts.steps_done, show="{:,}".format, note=asked),
        tile("Time", facts.train_s, show=format_seconds, note=elapsed),
        tile("Restarts", facts.restarts, show="{:,}".format, note="of servers and workers"),
    ]


def _staleness_note(facts: ServerFacts) -> str:
    if facts.staleness_mean is None:
        return "geo exchanges have none" if facts.mode == "geo" else ""
    return "units, of a push"


def _bound_note(facts: ServerFacts) -> str:
    if facts.staleness_max is None:
        return ""
    return f"units; bound {facts.staleness_bound:,}" if facts.staleness_bound is not None else "units; no bound"


def _beside(facts: ServerFacts, folder: ServerRunFolder, beside: Sequence[ServerRunFolder]) -> Markup:
    if not beside:
        return NOTHING
    folders = [folder, *beside]
    names = run_names(folders)
    table_ = server_tables.beside(names, [facts, *map(gather_server_facts, beside)])
    return join([_pairs(draw_beside(names, folders)), table_])


def _curves(folder: ServerRunFolder) -> Markup:
    charts = draw_server_curves(folder)
    if not charts:
        return absent("No step was recorded, so there is no curve to draw.")
    return join([chart_boxes(charts), server_tables.evaluations(folder.metrics.steps)])


def _staleness(facts: ServerFacts, folder: ServerRunFolder) -> Markup:
    chart = draw_histogram(folder)
    if chart is not None:
        return chart_boxes([chart])
    if facts.mode == "geo":
        return absent(
            "Exchanges of geo carry changes of local tables, not gradients of a pull: they have no staleness."
        )
    return absent("No staleness was recorded.")


def _servers(folder: ServerRunFolder) -> Markup:
    loads = server_loads(folder)
    if not loads:
        return absent("No figures of servers were recorded.")
    return join([_pairs(draw_servers(loads)), server_tables.servers(loads)])


def _workers(folder: ServerRunFolder) -> Markup:
    loads = worker_loads(folder)
    chart = draw_workers(loads)
    if chart is None:
        return absent("No times of workers were recorded.")
    return join([chart_boxes([chart]), server_tables.workers(loads)])


def _hot_keys(folder: ServerRunFolder) -> Markup:
    found = list(hot_keys(folder).items())
    if not found:
        return absent("No hot keys were recorded.")
    of, pieces = update_word(folder), []
    for place, (name, keys) in enumerate(found[:MAX_HOT_TABLES]):
        pieces.append(chart_box(draw_hot_keys(name, keys, of=of, place=place)))
        pieces.append(server_tables.hot_keys(name, keys, of=of))
    rest = len(found) - MAX_HOT_TABLES
    more = absent(f"Those of {rest} more tables are in server.json.") if rest > 0 else NOTHING
    return join([tag("div", *pieces, class_="columns"), more])


def _environment(folder: ServerRunFolder) -> Markup:
    machine = sorted(table(folder.ledger, "machine").items())
    spec = table(folder.run, "server")
    chosen = [(name, spec[name]) for name in ("launcher", "durability") if name in spec]
    pairs = [(str(name).replace("_", " "), text(value)) for name, value in [*chosen, *machine]]
    return facts_list(pairs) if pairs else absent("The environment was not recorded.")


def _pairs(pairs: Sequence[Sequence[Chart]]) -> Markup:
    """Each pair in a grid of its own, so that both stand side by side."""
    return join(chart_boxes(pair) for pair in pairs)
